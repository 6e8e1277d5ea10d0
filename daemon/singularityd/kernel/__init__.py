"""The privileged half: bpf, perf events, ptrace, /proc of others, ELF. Standard library only."""
