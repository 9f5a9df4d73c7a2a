"""Memory that a device still has.

Owns asking the system; what a batch takes is `batching.MemoryModel`'s.
"""

from __future__ import annotations

from pathlib import Path

KEEP = 0.1  # share of the free memory left alone: the system's, and the fragments'


def free_bytes(device: str = "cpu") -> int:
    """Bytes that a batch may take on the device, with a tenth left alone.

    On a CPU the lesser of the system's available memory and what the control group's limit leaves.
    """
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(torch.device(device))
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + reserved) * (1 - KEEP))
    if device.startswith("mps"):
        import torch

        return int((torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()) * (1 - KEEP))
    return int(min(_available(), _group_headroom()) * (1 - KEEP))


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _group_headroom() -> int:
    """What a container's limit leaves; a file cache that can be dropped counts as free."""
    for limit, usage, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        root = Path("/sys/fs/cgroup")
        try:
            most = (root / limit).read_text().strip()
            used = int((root / usage).read_text())
            kept = dict(line.split() for line in (root / stat).read_text().splitlines())
        except (OSError, ValueError):
            continue
        return 2**62 if most == "max" else max(int(most) - used + int(kept.get(cache, 0)), 0)
    return 2**62
