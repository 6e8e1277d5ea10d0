#!/bin/sh
# Prepare a Debian or Ubuntu host for `make demo` or `make test`: distribution packages, the service's user, and a virtual environment.
#
# usage: tools/setup.sh [demo|test]      `demo` is what the daemon and the demonstration need, `test` (the default) adds the test tools
#
# Does only what is missing, says each thing it does, and is quick when nothing is (a stamp in the environment).
# Settings:  PYTHON     the interpreter of the environment, 3.11 or later; by default the distribution's
#            VENV       where the environment is made (.venv)
#            SETUP_APT  `no` to install no packages and create no user: for hosts managed by something else
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
level=${1:-test}
venv=${VENV:-$root/.venv}
torch=2.13.0
nccl=2.32.3
usr=${SETUP_USR:-/usr}
PATH=$PATH:$usr/local/sbin:$usr/sbin
export PATH DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

say() { printf 'setup: %s\n' "$*"; }

fail() {
    printf 'setup: FAILED: %s\n' "$1" >&2
    printf 'setup: remedy: %s\n' "$2" >&2
    exit 1
}

# run REMEDY COMMAND...: a command whose failure ends the set-up with its name and a remedy; its output is kept quiet unless it fails
run() {
    remedy=$1
    shift
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1; then
        tail -n 30 "$log" >&2
        rm -f "$log"
        fail "$*" "$remedy"
    fi
    rm -f "$log"
}

# --- Debian packages -------------------------------------------------------------------------------------------------------------

installed() { [ "$(dpkg-query -W -f '${db:Status-Abbrev}' "$1" 2>/dev/null)" = 'ii ' ]; }

has_headers() {
    for file in "$usr"/src/linux-headers-*/include/generated/autoconf.h "/lib/modules/$(uname -r)/build/include/generated/autoconf.h"; do
        [ -e "$file" ] && return 0
    done
    return 1
}

# Packages that are missing. bcc, its headers and the tools come from the distribution: PyPI's `bcc` is something else.
missing_packages() {
    for package in python3 python3-venv python3-bpfcc libbpf1; do
        installed $package || printf '%s ' $package
    done
    has_headers || printf 'linux-headers-%s ' "$(dpkg --print-architecture)"
    [ "$level" = test ] || return 0
    for pair in promtool:prometheus bpftrace:bpftrace strace:strace gdb:gdb readelf:binutils ip:iproute2 gcc:gcc systemd-analyze:systemd; do
        command -v "${pair%%:*}" >/dev/null 2>&1 || printf '%s ' "${pair#*:}"
    done
}

install_packages() {
    command -v dpkg-query >/dev/null 2>&1 || fail 'no dpkg: this is not Debian or Ubuntu' \
        'install bcc for the system Python, libbpf, kernel headers and the tools by hand, then run with SETUP_APT=no'
    missing=$(missing_packages)
    if [ -z "$missing" ]; then
        say 'distribution packages: all there'
        return
    fi
    [ "$(id -u)" = 0 ] || fail "packages are missing and this is not root: $missing" "as root: apt-get install --no-install-recommends $missing"
    say "distribution packages: installing $missing(this can take minutes)"
    apt='apt-get -q -y -o Acquire::Retries=5 -o DPkg::Lock::Timeout=600'
    # shellcheck disable=SC2086
    run 'is the network there? run apt-get update by hand to see' $apt update
    # The package prometheus is wanted for promtool only; a policy that says no keeps its service from starting.
    policy=
    if [ ! -e "$usr/sbin/policy-rc.d" ]; then
        policy=$usr/sbin/policy-rc.d
        trap 'rm -f "$policy"' EXIT INT TERM
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    # shellcheck disable=SC2086
    run 'run the command by hand to see; packages of another release or a held package are the usual cause' \
        $apt install --no-install-recommends $missing
    [ -z "$policy" ] || rm -f "$policy"
    case " $missing" in *' prometheus '*) systemctl disable prometheus prometheus-node-exporter >/dev/null 2>&1 || true ;; esac
}

create_user() {
    if getent passwd singularityd >/dev/null; then
        return
    fi
    if [ "$(id -u)" != 0 ]; then
        say 'user singularityd: missing, and this is not root; the daemon needs it'
        return
    fi
    say 'user singularityd: creating it (system user, no home, no shell)'
    run 'create a system user and group singularityd by hand' \
        useradd --system --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin singularityd
}

# --- Python ----------------------------------------------------------------------------------------------------------------------

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# The distribution's Python comes first: the front runs as user singularityd, who cannot read an interpreter in somebody's home.
choose_python() {
    for candidate in ${PYTHON:-"$usr/bin/python3" "$usr/bin/python3.13" "$usr/bin/python3.12" "$usr/bin/python3.11" python3}; do
        if command -v "$candidate" >/dev/null 2>&1 && recent "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later${PYTHON:+ (PYTHON=$PYTHON)}" 'apt-get install python3 (Debian 12 has 3.11), or set PYTHON'
}

make_environment() {
    if "$venv/bin/python" -c 'import pip' 2>/dev/null && recent "$venv/bin/python"; then
        return
    fi
    python=$(choose_python)
    say "environment: making $venv with $("$python" --version 2>&1)"
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        run "remove $venv and run again" "$python" -m venv --clear "$venv"
    elif command -v virtualenv >/dev/null 2>&1; then
        run "remove $venv and run again" virtualenv --quiet --clear --python "$python" "$venv"
    else
        fail "$python has no ensurepip" 'apt-get install python3-venv, or virtualenv'
    fi
}

stamp_of() { cat "$root/pyproject.toml" "$root/tools/setup.sh" | cksum; }

pip_install() { run 'run the command by hand to see; a slow or absent package index is the usual cause' "$venv/bin/python" -m pip install --quiet "$@"; }

install_python_packages() {
    stamp=$venv/setup.stamp
    if [ "$(cat "$stamp" 2>/dev/null)" = "$(stamp_of)" ]; then
        say "environment: $venv is up to date"
        return
    fi
    rm -f "$stamp"
    # torch comes first and exact, in a command of its own: whatever else is installed must not choose another build of it.
    say "environment: torch $torch"
    pip_install "torch==$torch"
    "$venv/bin/python" -m pip freeze | grep '^torch==' >"$venv/constraints.txt"
    say "environment: nvidia-nccl-cu12 $nccl (the real NCCL; it loads and answers without a GPU)"
    pip_install --no-deps "nvidia-nccl-cu12==$nccl"
    say 'environment: singularityd with the extras agent, otel and dev'
    pip_install --constraint "$venv/constraints.txt" --editable "$root[agent,otel,dev]"
    stamp_of >"$stamp"
}

case $level in
demo | test) ;;
*) fail "unknown level $level" 'tools/setup.sh demo, or tools/setup.sh test' ;;
esac
if [ "${SETUP_APT:-yes}" = yes ]; then
    install_packages
    create_user
fi
make_environment
install_python_packages
