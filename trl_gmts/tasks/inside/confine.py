"""Confine the current process for good: resource limits, no capabilities, and a filter on system calls.

Runs in the sandboxed process before any text of a model does, under either kind of isolation. Namespaces (files, network,
other processes) are not made here but by bubblewrap, outside. On a system other than Linux only the resource limits apply.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from typing import NamedTuple


PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
CLONE_THREAD = 0x10000
CAPABILITY_VERSION_3 = 0x20080522


# Numbers from the kernel's system call tables. Refused outright:
#   new programs and processes      fork vfork execve execveat (clone is allowed for threads only)
#   the network, also through       socket, io_uring_setup
#   memory that no limit counts     memfd_create memfd_secret shmget semget msgget mq_open
#   other processes                 ptrace process_vm_* kcmp pidfd_*, and queued signals
#   the system                      mounts, namespaces, keys, bpf, performance events, page faults in user space
# Allowed on the process itself only: kill tkill tgkill prlimit64.
class SystemCalls(NamedTuple):
    audit: int
    """The architecture, as the kernel's audit code names it."""
    clone: int
    clone3: int
    prlimit64: int
    own_process_only: tuple[int, ...]
    refused: tuple[int, ...]


SYSTEM_CALLS = {
    "x86_64": SystemCalls(
        audit=0xC000003E,
        clone=56,
        clone3=435,
        prlimit64=302,
        own_process_only=(62, 200, 234, 302),
        refused=(
            *(57, 58, 59, 322, 41, 425, 319, 447, 29, 64, 68, 240, 101, 310, 311, 312, 424, 434, 438, 129, 297),
            *(155, 161, 165, 166, 428, 429, 430, 442, 272, 308, 248, 249, 250, 321, 298, 323),
        ),
    ),
    "aarch64": SystemCalls(
        audit=0xC00000B7,
        clone=220,
        clone3=435,
        prlimit64=261,
        own_process_only=(129, 130, 131, 261),
        refused=(
            *(221, 281, 198, 425, 279, 447, 194, 190, 186, 180, 117, 270, 271, 272, 424, 434, 438, 138, 240),
            *(41, 51, 40, 39, 428, 429, 430, 442, 97, 268, 217, 218, 219, 280, 241, 282),
        ),
    ),
}


def confine(limits: dict[str, int]) -> None:
    """
    Apply every limit to this process. Nothing here can be undone, and threads started later inherit it.

    Args:
        limits: `cpu_seconds`, `memory_bytes` and `file_bytes`.
    """
    limit_resources(limits)
    if sys.platform == "linux":
        give_up_privileges()
        refuse_system_calls()


def limit_resources(limits: dict[str, int]) -> None:
    """Set CPU time, address space, file size (output is a file here too), open files and core dumps."""
    cpu = limits["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_bytes"], limits["file_bytes"]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], limits["memory_bytes"]))
    else:
        # No system call filter here: the user's process count is the nearest thing. macOS refuses RLIMIT_AS.
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))


def give_up_privileges() -> None:
    """Die with the parent; be unreadable to other processes of the user; hold no capability and gain none."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    _check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    _check(libc.capset(header, bytes(24)), "capset")


def refuse_system_calls() -> None:
    """Install the filter: a refused call fails with EPERM, as it would for lack of permission."""
    program = filter_program(platform.machine(), os.getpid())
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of 8-byte instructions, padding, their address
    description = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, description, 0, 0), "prctl(PR_SET_SECCOMP)")


def filter_program(machine: str, pid: int) -> bytes:
    """
    The classic BPF program of the filter.

    Args:
        machine: as `platform.machine()` names it.
        pid: the only process that signals and limits may be meant for.

    Returns:
        The instructions, 8 bytes each.
    """
    if machine not in SYSTEM_CALLS:
        raise NotImplementedError(
            f"The sandbox has no system call table for {machine!r}, only for {', '.join(SYSTEM_CALLS)}. "
            "Add one to SYSTEM_CALLS in trl_gmts/tasks/inside/confine.py, or score code on another machine."
        )
    calls = SYSTEM_CALLS[machine]
    load, equal, at_least, any_bit, result = 0x20, 0x15, 0x35, 0x45, 0x06
    number, architecture, argument = 0, 4, 16  # offsets in struct seccomp_data
    allow, refuse, missing, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # 1 is EPERM, 0x26 ENOSYS

    def do(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    program = [
        do(load, architecture),
        do(equal, calls.audit, if_true=1),
        do(result, kill),
        do(load, number),
        # x86-64's other table (x32) starts here, and no table reaches it otherwise
        do(at_least, 0x40000000, if_false=1),
        do(result, kill),
        # glibc falls back from clone3, whose flags a filter cannot see, to clone
        do(equal, calls.clone3, if_false=1),
        do(result, missing),
        do(equal, calls.clone, if_false=4),
        do(load, argument),
        do(any_bit, CLONE_THREAD, if_false=1),
        do(result, allow),
        do(result, refuse),
    ]
    for call in calls.refused:
        program += [do(equal, call, if_false=1), do(result, refuse)]
    for call in calls.own_process_only:
        # To prlimit64 the process itself is also 0; to kill, 0 would be its whole group.
        own = (pid, 0) if call == calls.prlimit64 else (pid, pid)
        program += [
            do(equal, call, if_false=5),
            do(load, argument),
            do(equal, own[0], if_true=1),
            do(equal, own[1], if_false=1),
            do(result, allow),
            do(result, refuse),
        ]
    return b"".join([*program, do(result, allow)])


def _check(status: int, what: str) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), f"{what} failed: {os.strerror(ctypes.get_errno())}")
