"""Disks that fill up, for tests of what happens then."""

import ctypes
import resource
import subprocess

_NEW_NAMESPACE = 0x20000


def small_disk(folder: str) -> str:
    """A file system of 64 KiB that only this process and its children see; where mounting is not allowed, files that
    end there. Gives the words of the error that a full one makes."""
    mounts = (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder])
    mounted = ctypes.CDLL(None).unshare(_NEW_NAMESPACE) == 0
    if mounted and all(subprocess.run(mount, capture_output=True).returncode == 0 for mount in mounts):
        return "No space left on device"
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
    return "File too large"
