"""The seccomp profile `RuntimeDefault`: what it forbids to a container without capabilities, after the
profile that containerd and Docker share. Theirs is a list of what is allowed; here stand the calls that a
program could miss. libseccomp, which Debian's apt has anyway, knows their numbers.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Collection
from typing import Final

ALLOW: Final = 0x7FFF_0000
ERRNO: Final = 0x0005_0000
FORBIDDEN: Final = (
    *("add_key", "bpf", "fanotify_init", "fsconfig", "fsmount", "fsopen", "fspick", "io_uring_enter"),
    *("io_uring_register", "io_uring_setup", "kcmp", "keyctl", "migrate_pages", "mount", "mount_setattr"),
    *("move_mount", "move_pages", "name_to_handle_at", "open_by_handle_at", "open_tree", "perf_event_open"),
    *("pidfd_getfd", "pivot_root", "process_madvise", "quotactl", "reboot", "request_key", "setns"),
    *("sethostname", "swapon", "syslog", "umount2", "unshare", "userfaultfd"),
)
NEED: Final = {"SYS_NICE": ("get_mempolicy", "mbind", "set_mempolicy", "set_mempolicy_home_node")}
"""Calls that a capability of the container allows, though the process itself has it not."""


def forbid(capabilities: Collection[str]) -> None:
    """From now on, for this process and all that it starts. Takes PR_SET_NO_NEW_PRIVS."""
    more = [name for needed, names in NEED.items() if needed not in capabilities for name in names]
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ALLOW)))
    # glibc goes on with clone where clone3 is not known
    for name, error in (*((name, errno.EPERM) for name in (*FORBIDDEN, *more)), ("clone3", errno.ENOSYS)):
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # else this version does not know it
            refused = library.seccomp_rule_add(context, ctypes.c_uint32(ERRNO | error), number, 0)
            assert refused == 0, name
    assert library.seccomp_load(context) == 0
