"""Skipping a call leaves the stack as it was at the entry and touches nothing but what it must."""

from __future__ import annotations

import ctypes as c

import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd.kernel.ptrace.registers import Aarch64Registers, X86Registers, find_ret

WORD = st.integers(0, (1 << 64) - 1)


def test_the_tables_are_as_large_as_the_kernels() -> None:
    assert c.sizeof(X86Registers) == 27 * 8
    assert c.sizeof(Aarch64Registers) == 34 * 8
    assert Aarch64Registers.sp.offset == 31 * 8
    assert X86Registers.rip.offset == 16 * 8
    assert X86Registers.rsp.offset == 19 * 8


@given(WORD, WORD, WORD)
def test_x86_64(value: int, stack: int, gadget: int) -> None:
    before = X86Registers(*range(100, 127))
    after = X86Registers(*range(100, 127))
    after.skip_call(value, entry_sp=stack, gadget=gadget)
    assert (after.rax, after.rsp, after.rip) == (value, stack, gadget)
    assert after.orig_rax == (1 << 64) - 1
    for name, _ in X86Registers._fields_:
        if name not in {"rax", "rsp", "rip", "orig_rax"}:
            assert getattr(after, name) == getattr(before, name)


@given(WORD, WORD, WORD)
def test_aarch64_returns_through_x30(value: int, stack: int, link: int) -> None:
    table = Aarch64Registers(sp=1, pc=2, pstate=3)
    for number in range(31):
        table.x[number] = 1000 + number
    table.x[30] = link
    table.skip_call(value, entry_sp=stack)
    assert (table.x[0], table.sp, table.pc) == (value, stack, link)
    assert list(table.x[1:30]) == [1000 + number for number in range(1, 30)]
    assert (table.x[30], table.pstate) == (link, 3)


@pytest.mark.parametrize("value", [-1, -512])
def test_a_negative_result_is_its_two_s_complement(value: int) -> None:
    x86, arm = X86Registers(), Aarch64Registers()
    x86.skip_call(value, entry_sp=0, gadget=0)
    arm.skip_call(value, entry_sp=0)
    assert x86.rax == arm.x[0] == value + (1 << 64)


def test_a_ret_is_found_also_within_an_instruction_but_not_where_the_probe_wrote() -> None:
    assert find_ret(b"\x55\x48\x89\xc3\x5d\xc3", 0x1000) == 0x1003
    assert find_ret(b"\xc3\x90\xc3", 0x1000) == 0x1002
    assert find_ret(b"\xc3\x90\x90", 0x1000) is None
    assert find_ret(b"", 0x1000) is None
