"""The system call filter of the sandbox (seccomp), for x86-64 and ARM64. Standard library alone.

It denies what no solution of a programming task needs: what leaves the sandbox or widens the kernel's surface, what
reads or stops other processes, and what holds memory that no limit on a process counts: anonymous files, shared memory
and message queues (System V and POSIX), io_uring, pages pinned in pipes, large socket buffers, shared mappings without
a file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)
machine = os.uname().machine

_SECCOMP = 22
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_DENIED = {  # name: number on x86-64, number on ARM64; None: there is no such call
    # Sockets other than pairs; a pair's buffers keep their size.
    "socket": (41, 198), "setsockopt": (54, 208),
    # Namespaces, mounts and roots.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    # Other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    # The kernel.
    "reboot": (169, 142), "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "perf_event_open": (298, 241), "bpf": (321, 280), "userfaultfd": (323, 282), "modify_ldt": (154, None),
    # Memory that the limits do not count.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "remap_file_pages": (216, 234), "vmsplice": (278, 75),
    "shmget": (29, 194), "shmctl": (31, 195), "shmat": (30, 196), "shmdt": (67, 197),
    "semget": (64, 190), "semctl": (66, 191), "semop": (65, 193), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgctl": (71, 187), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
    "io_setup": (206, 0), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
}  # fmt: skip
_CLONE = {"x86_64": 56, "aarch64": 220}
_NEW_NAMESPACES = 0x7E020000  # flags of clone
_CLONE3 = 435  # its flags are in memory, where a filter does not see them; without it, clone is used
_MMAP = {"x86_64": 9, "aarch64": 222}
_SHARED, _WITHOUT_FILE, _HUGE = 1, 0x20, 0x40000  # flags of mmap


def check_filter() -> None:
    """Raises OSError if this kernel has no system call filter."""
    if libc.prctl(_SECCOMP, 2, None, 0, 0) < 0 and ctypes.get_errno() != errno.EFAULT:
        raise OSError(ctypes.get_errno(), "it has no system call filter (seccomp)")


def filter_calls() -> None:
    """Install the filter: denied calls fail with EPERM, another architecture's calls kill the process.

    Raises OSError where there is no seccomp.
    """

    def op(code: int, jump_true: int, jump_false: int, k: int) -> bytes:
        return struct.pack("HBBI", code, jump_true, jump_false, k)

    load, equal, bits, end = 0x20, 0x15, 0x45, 0x06
    allow, deny, unknown, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
    program = [op(load, 0, 0, 4), op(equal, 1, 0, _ARCHITECTURE[machine]), op(end, 0, 0, kill), op(load, 0, 0, 0)]
    if machine == "x86_64":
        program += [op(0x35, 0, 1, 0x40000000), op(end, 0, 0, kill)]  # the x32 calls
    for numbers in _DENIED.values():
        number = numbers[machine == "aarch64"]
        if number is not None:
            program += [op(equal, 0, 1, number), op(end, 0, 0, deny)]
    program += [op(equal, 0, 1, _CLONE3), op(end, 0, 0, unknown)]
    program += [op(equal, 0, 4, _CLONE[machine]), op(load, 0, 0, 16), op(bits, 0, 1, _NEW_NAMESPACES)]
    program += [op(end, 0, 0, deny), op(end, 0, 0, allow)]
    # A shared mapping without a file keeps pages that are in no process's resident memory, and so do huge pages.
    program += [op(equal, 0, 6, _MMAP[machine]), op(load, 0, 0, 40), op(bits, 2, 0, _HUGE)]
    program += [op(bits, 0, 2, _WITHOUT_FILE), op(bits, 0, 1, _SHARED), op(end, 0, 0, deny), op(end, 0, 0, allow)]
    program += [op(end, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(program), 8 * len(program))
    fprog = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    if libc.prctl(_SECCOMP, 2, fprog, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), f"filter system calls: {os.strerror(ctypes.get_errno())}")
