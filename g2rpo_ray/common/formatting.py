"""Numbers as people read them."""

NOTHING = "–"
"""Stands where there is no number."""


def format_score(score: float | None, digits: int = 4) -> str:
    """A reward with so many digits after the point."""
    return NOTHING if score is None else f"{score:.{digits}f}"


def format_change(before: float | None, after: float | None) -> str:
    """Signed difference of two rewards."""
    return NOTHING if before is None or after is None else f"{after - before:+.4f}"


def format_seconds(seconds: float) -> str:
    """A duration: ``8.3 s``, ``42 s``, ``3 min 05 s``, ``2 h 07 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_size(size_bytes: float) -> str:
    """A size on a disk: ``612 B``, ``12 kB``, ``3.4 MB``, ``23.8 GB``; powers of ten."""
    if size_bytes < 1e3:
        return f"{size_bytes:.0f} B"
    if size_bytes < 1e6:
        return f"{size_bytes / 1e3:.0f} kB"
    if size_bytes < 1e9:
        return f"{size_bytes / 1e6:.1f} MB"
    return f"{size_bytes / 1e9:.1f} GB"
