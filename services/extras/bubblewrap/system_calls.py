"""System calls that a sandboxed program may make, by name, with their numbers on each machine.

All other calls are denied: above all sockets, processes, and calls that name another process. The
numbers are from the kernel's ``asm/unistd_64.h`` (x86_64) and ``asm-generic/unistd.h`` (aarch64);
the tests compare them. None means that the machine has no such call.
"""

MACHINES = ("x86_64", "aarch64")
"""Columns of the tables."""

Numbers = tuple[int | None, int | None]

ALLOWED: dict[str, Numbers] = {
    # Files.
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "close": (3, 57),
    "close_range": (436, 436),
    "lseek": (8, 62),
    "open": (2, None),
    "openat": (257, 56),
    "openat2": (437, 437),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "getxattr": (191, 8),
    "lgetxattr": (192, 9),
    "fgetxattr": (193, 10),
    "listxattr": (194, 11),
    "llistxattr": (195, 12),
    "flistxattr": (196, 13),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "fadvise64": (221, 223),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "flock": (73, 32),
    "umask": (95, 166),
    "copy_file_range": (326, 285),
    "sendfile": (40, 71),
    # Descriptors and waiting.
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "eventfd": (284, None),
    "eventfd2": (290, 19),
    "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87),
    # Memory.
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    "msync": (26, 227),
    "mincore": (27, 232),
    "brk": (12, 214),
    "membarrier": (324, 283),
    # Own threads.
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "gettid": (186, 178),
    "sched_yield": (24, 124),
    "arch_prctl": (158, None),
    # Signals to the own process.
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    # Time.
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "alarm": (37, None),
    "pause": (34, None),
    "times": (100, 153),
    # Own process and host.
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getpgrp": (111, None),
    "getrandom": (318, 278),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getcpu": (309, 168),
    "getrusage": (98, 165),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
}
"""Calls allowed with any arguments."""

CHECKED: dict[str, Numbers] = {
    "exit": (60, 93),
    "exit_group": (231, 94),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "sched_getaffinity": (204, 123),
    "sched_getscheduler": (145, 120),
    "sched_getparam": (143, 121),
    "clone": (56, 220),
}
"""Calls allowed with the arguments that :data:`ARGUMENTS` lists; ``clone`` for threads only."""

ARGUMENTS: dict[str, tuple[int, tuple[int, ...]]] = {
    # Not 128 plus a signal number: bubblewrap reports killed programs that way.
    "exit": (0, (0, 1)),
    "exit_group": (0, (0, 1)),
    # Not F_SETOWN and F_SETSIG, by which an open file sends any signal to any process of the user.
    "fcntl": (1, (0, 1, 2, 3, 4, 5, 6, 7, 1030)),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
    "ioctl": (1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    # PR_SET_NAME.
    "prctl": (0, (15,)),
    # 0 is the caller itself.
    "prlimit64": (0, (0,)),
    "sched_getaffinity": (0, (0,)),
    "sched_getscheduler": (0, (0,)),
    "sched_getparam": (0, (0,)),
}
"""Index of the argument that decides about a checked call, from 0, and its allowed values."""

REFUSED_IN_SANDBOXES: dict[str, Numbers] = {
    # Memory that exists without being mapped by a process, so that few limits count it.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "vmsplice": (278, 75),
    "io_setup": (206, 0),
    # Rights in new namespaces, and parts of the kernel that ordinary programs do not use.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
"""Calls that commands in the sandbox of an episode may not make; others are allowed.

``clone`` may not create user namespaces. :data:`SOCKETS` may create only certain sockets.
"""

REFUSED_WITHOUT_CGROUP: dict[str, Numbers] = {
    # Queues of events, half a GiB for one user, which no process maps.
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    # They could stop ``init.py``, which then checks the memory of all processes.
    "ptrace": (101, 117),
    "process_vm_writev": (311, 271),
}
"""Calls that commands in the sandbox of an episode may not make where no memory cgroup limits them."""

REFUSED_ON_INIT: dict[str, tuple[Numbers, dict[int, tuple[int, ...]]]] = {
    "prlimit64": ((302, 261), {0: (1,)}),
    "sched_setaffinity": ((203, 122), {0: (1,)}),
    "sched_setattr": ((314, 274), {0: (1,)}),
    "sched_setparam": ((142, 118), {0: (1,)}),
    "sched_setscheduler": ((144, 119), {0: (1,)}),
    # A group of processes (PRIO_PGRP), or all of the user (PRIO_USER), may contain process 1.
    "setpriority": ((141, 140), {0: (1, 2), 1: (1,)}),
}
"""Calls that could end or delay ``init.py``, process 1; refused values of their arguments, by index."""

SOCKETS: dict[str, Numbers] = {"socket": (41, 198), "socketpair": (53, 199)}
"""Calls that create sockets of the family in their first argument, and the protocol in their third."""
UNIX_FAMILY = 1
NETWORK_PROTOCOLS: dict[int, tuple[int, ...]] = {
    2: (0, 6, 17),
    10: (0, 6, 17),
    16: (0,),
}
"""Protocols by family: TCP and UDP over IPv4 and IPv6, and routes over netlink.

They cannot leave the sandbox's own network; vsock, for example, can. Memory cgroups do not count connections
that no process has accepted, messages of netlink, and memberships in multicast groups.
"""

CLONE3 = 435
"""Number of ``clone3`` on all machines, treated as unknown.

The filter cannot read its flags, which a pointer refers to; the C library falls back to ``clone``.
"""

NEWEST = 450
"""Highest known number; higher calls are unknown, as in an older kernel, and the C library falls back."""
