"""The command: list, check the disk, fetch what is missing, check what was fetched."""

from collections.abc import Sequence

from g2rpo_ray.commands.hub import (
    HubFile,
    Listing,
    OfflineError,
    check_disk,
    fetch,
    list_files,
    read_record,
    write_record,
)
from g2rpo_ray.common.formatting import format_size
from g2rpo_ray.config import Config
from g2rpo_ray.models.catalogue import CATALOGUE, DownloadError, Target, targets_of


def download(config: Config, also: Sequence[str] = (), dry_run: bool = False) -> None:
    """Fetch every model that ``config`` names into the folder that it expects.

    Args:
        also: further targets, such as ``models/G2RPO``.
        dry_run: list files and sizes, fetch nothing.

    Raises:
        DownloadError: see ``hub``; offline: what is missing.
    """
    targets = targets_of(config, also)
    if not targets:
        print("the configuration needs nothing that is not in this package")
        return
    unknown = [t for t in targets if t.source is None and not t.path.exists()]
    if unknown:
        raise DownloadError(
            "; ".join(f"{t.setting} {t.path}: does not exist, and not known" for t in unknown)
            + f". Known by the last part of the path: {', '.join(CATALOGUE)}"
        )
    for target in targets:
        if target.source is None:
            print(f"{target.path}: in place, not from the hub ({target.setting})")
    known = [target for target in targets if target.source is not None]
    try:
        listings = [list_files(target) for target in known]
    except OfflineError as error:
        _report_offline(known, error)
        return
    missing = [
        (listing, file)
        for listing in listings
        for file in listing.files
        if not file.is_whole(listing.path_of(file))
    ]
    for listing in listings:
        _print_listing(listing, [file for found, file in missing if found is listing])
    check_disk(missing)
    if dry_run:
        return
    for number, (listing, file) in enumerate(missing, start=1):
        size = format_size(file.size)
        print(f"[{number}/{len(missing)}] {listing.path_of(file)}  {size}", flush=True)
        fetch(listing, file)
    for listing in listings:
        write_record(listing)
    print("everything is in place, checksums compared")


def _print_listing(listing: Listing, missing: Sequence[HubFile]) -> None:
    total, to_come = (format_size(sum(f.size for f in fs)) for fs in (listing.files, missing))
    print(
        f"{listing.target.path}  ({listing.target.setting})\n"
        f"  {listing.repo} at {listing.commit}: {len(listing.files)} files, {total}; "
        f"{len(missing)} to fetch, {to_come}"
    )
    for file in listing.files:
        state = "to fetch" if file in missing else "in place"
        print(f"  {state}  {format_size(file.size):>10}  {file.name}")


def _report_offline(targets: Sequence[Target], error: OfflineError) -> None:
    """Local folders are enough; say what they lack.

    Raises:
        OfflineError: something is missing.
    """
    lacking = [line for target in targets for line in _lacking(target)]
    if lacking:
        lines = "\n".join(f"  {line}" for line in lacking)
        raise OfflineError(f"{error}, and on this machine are missing or damaged:\n{lines}")
    print(f"{error}; everything that was downloaded is in place")


def _lacking(target: Target) -> list[str]:
    record = read_record(target)
    if record is not None:
        paths = [record.path_of(f) for f in record.files if not f.is_whole(record.path_of(f))]
        return [f"{path} ({target.setting}, {record.repo})" for path in paths]
    assert target.source is not None
    if not target.path.exists():
        return [f"{target.path} ({target.setting}, {target.source.repo})"]
    if target.is_file:
        return []
    # Put there by hand: which files it needs is known only as patterns; these are never optional.
    needed = [p for p in target.source.patterns if "/" in p or p.endswith("config.json")]
    return [
        f"{target.path / pattern} ({target.setting}, {target.source.repo})"
        for pattern in needed
        if not any(target.path.glob(pattern))
    ]
