"""Fetching models from the hub: list, check the disk, fetch what is missing, check what came.

The library fetches files in parallel and goes on where a connection broke. List and checksums are
looked at here: its own dry run makes folders, and of what it has fetched it compares the size only.
"""

import glob
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, errors, snapshot_download
from huggingface_hub.utils import tqdm

from g2rpo_ray.common.files import (
    cause_of,
    check_room,
    nearest_folder,
    replace_text,
    sha256_of_file,
    writing,
)
from g2rpo_ray.common.formatting import format_size
from g2rpo_ray.common.stop import StopSignal
from g2rpo_ray.config import Config
from g2rpo_ray.models.catalogue import CATALOGUE, DownloadError, Source, Target, targets_of

CLIENT_ERROR: type[Exception] = errors.HfHubHTTPError.__bases__[0]
"""Of all its HTTP client's errors and its own: httpx's up to version 1, httpx2's since 2."""


class OfflineError(DownloadError):
    """The hub cannot be reached."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository at one commit."""

    name: str
    size: int
    """Bytes."""
    sha256: str | None
    """Of a large file."""
    git_sha1: str | None
    """Git's blob id, of a small one."""

    def is_whole(self, path: Path) -> bool:
        """Whether the file on the disk is this one, to the bit."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        if self.sha256:
            return sha256_of_file(path) == self.sha256
        content = b"blob %d\0" % self.size + path.read_bytes()
        return hashlib.sha1(content).hexdigest() == self.git_sha1


@dataclass(frozen=True)
class Listing:
    """What belongs into a target's folder."""

    target: Target
    repo: str
    commit: str
    files: list[HubFile]

    def path_of(self, file: HubFile) -> Path:
        return self.target.folder / file.name

    def missing(self) -> list[HubFile]:
        """Files that are not there, or damaged; reads all that is there."""
        return [file for file in self.files if not file.is_whole(self.path_of(file))]


def download(config: Config, also: Sequence[str] = (), dry_run: bool = False) -> None:
    """Fetch every model that ``config`` names into the folder that it expects.

    Args:
        also: further targets, such as ``models/G2RPO``.
        dry_run: list files and sizes, fetch nothing.

    Raises:
        DownloadError: no such repository or commit, no access to it, a disk is too small, or what
            came is not what the hub lists.
        OfflineError: no connection, and something is missing.
        StopRequested: a signal came while files were fetched.
    """
    targets = targets_of(config, also)
    if not targets:
        print("the configuration needs nothing that is not in this package")
        return
    known = _known(targets)
    try:
        listings = [_list_files(target) for target in known]
    except OfflineError as error:
        _report_offline(known, error)
        return
    missing = [(listing, listing.missing()) for listing in listings]
    for listing, files in missing:
        _print_listing(listing, files)
    _check_disks(missing)
    if dry_run:
        return
    for listing, files in missing:
        if files:
            _fetch(listing, files)
        _write_record(listing)
    print("everything is in place, checksums compared")


def _known(targets: Sequence[Target]) -> list[Target]:
    """Those in the catalogue; another one must be on the disk already."""
    unknown = [target for target in targets if target.source is None]
    absent = [target for target in unknown if not target.path.exists()]
    if absent:
        raise DownloadError(
            "; ".join(f"{t.setting} {t.path}: does not exist, and not known" for t in absent)
            + f". Known by the last part of the path: {', '.join(CATALOGUE)}"
        )
    for target in unknown:
        print(f"{target.path}: in place, not from the hub ({target.setting})")
    return [target for target in targets if target.source is not None]


def _list_files(target: Target) -> Listing:
    """Ask the hub which files there are, with sizes and checksums."""
    source = target.source
    assert source is not None
    recorded = _read_record(target)
    revision = source.revision or (recorded.commit if recorded else "main")
    with _explained(source):
        info = HfApi().model_info(source.repo, revision=revision, files_metadata=True)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    names = source.wanted(list(siblings))
    if not names or info.sha is None:
        raise DownloadError(
            f"{source.repo} at {revision} has none of the files {', '.join(source.patterns)}"
        )
    files = []
    for name in names:
        sibling = siblings[name]
        size = sibling.lfs.size if sibling.lfs else sibling.size
        sha256 = sibling.lfs.sha256 if sibling.lfs else None
        if size is None or not (sha256 or sibling.blob_id):
            raise DownloadError(f"{source.repo}: the hub gives no size or checksum of {name}")
        files.append(HubFile(name, size, sha256, sibling.blob_id))
    return Listing(target, source.repo, info.sha, files)


def _print_listing(listing: Listing, missing: Sequence[HubFile]) -> None:
    print(
        f"{listing.target.path}  ({listing.target.setting})\n"
        f"  {listing.repo} at {listing.commit}: {len(listing.files)} files, "
        f"{_size(listing.files)}; {len(missing)} to fetch, {_size(missing)}"
    )
    for file in listing.files:
        state = "to fetch" if file in missing else "in place"
        print(f"  {state}  {format_size(file.size):>10}  {file.name}")


def _check_disks(missing: Sequence[tuple[Listing, Sequence[HubFile]]]) -> None:
    """Compare what is to come with what is free, disk by disk."""
    wanted: dict[int, int] = defaultdict(int)
    folders: dict[int, Path] = {}
    for listing, files in missing:
        folder = nearest_folder(listing.target.folder)
        disk = folder.stat().st_dev
        # Damaged ones are deleted before they are fetched again.
        old = [path for file in files if (path := listing.path_of(file)).is_file()]
        wanted[disk] += sum(file.size for file in files) - sum(p.stat().st_size for p in old)
        folders[disk] = folder
    for disk, size in wanted.items():
        check_room(folders[disk], size, "what is to come")


def _fetch(listing: Listing, files: Sequence[HubFile]) -> None:
    """Fetch files at once, and compare their checksums."""
    source, folder = listing.target.source, listing.target.folder
    assert source is not None
    print(f"{folder}: fetching {len(files)} files, {_size(files)}", flush=True)
    for file in files:
        # The library would take a damaged file that it has fetched itself for whole.
        listing.path_of(file).unlink(missing_ok=True)
    with StopSignal("whole files stay; the same command fetches the others") as stop:

        class Bar(tqdm):
            """Where the library's threads come by while they fetch, and can be stopped."""

            def update(self, n: float | None = 1) -> bool | None:
                stop.check()
                return super().update(n)

        with writing(folder), _explained(source):
            snapshot_download(
                listing.repo,
                revision=listing.commit,
                local_dir=folder,
                allow_patterns=[glob.escape(file.name) for file in files],
                tqdm_class=Bar,
            )
    for file in files:
        path = listing.path_of(file)
        if not path.exists():
            raise DownloadError(f"{path}: {listing.repo} did not give it out; try again")
        if not file.is_whole(path):
            path.unlink()
            raise DownloadError(
                f"{path}: its checksum is not the one that {listing.repo} at {listing.commit} "
                "lists; it was removed. Try again; a proxy or mirror may change files"
            )


def _report_offline(targets: Sequence[Target], error: OfflineError) -> None:
    """Local folders are enough; say what they lack."""
    lacking = [line for target in targets for line in _lacking(target)]
    if lacking:
        lines = "\n".join(f"  {line}" for line in lacking)
        raise OfflineError(f"{error}, and on this machine are missing or damaged:\n{lines}")
    print(f"{error}; everything that was downloaded is in place")


def _lacking(target: Target) -> list[str]:
    record, source = _read_record(target), target.source
    assert source is not None
    if record is not None:
        paths = [record.path_of(file) for file in record.missing()]
    elif not target.path.exists():
        paths = [target.path]
    elif target.is_file:
        paths = []
    else:
        # Put there by hand: which files it needs is known only as patterns; these are never
        # optional.
        needed = [p for p in source.patterns if "/" in p or p.endswith("config.json")]
        paths = [target.path / p for p in needed if not any(target.path.glob(p))]
    return [f"{path} ({target.setting}, {source.repo})" for path in paths]


def _write_record(listing: Listing) -> None:
    """Write down what lies there, so that it can be checked without the hub."""
    content = {"repo": listing.repo, "commit": listing.commit}
    files = [asdict(file) for file in listing.files]
    path = _record_path(listing.target)
    replace_text(path, json.dumps(content | {"files": files}, indent=1))


def _read_record(target: Target) -> Listing | None:
    """What an earlier download wrote down."""
    path = _record_path(target)
    try:
        content = json.loads(path.read_text())
        files = [HubFile(**entry) for entry in content["files"]]
        return Listing(target, content["repo"], content["commit"], files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DownloadError(f"{path}: not readable: {cause_of(error, path)}; remove it") from error


def _record_path(target: Target) -> Path:
    return target.folder / f".{target.path.name}.g2rpo-download.json"


def _size(files: Sequence[HubFile]) -> str:
    return format_size(sum(file.size for file in files))


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Turn the hub's errors into words that help; none of them carries the token."""
    try:
        yield
    except errors.LocalEntryNotFoundError as error:
        # That it is not on the disk, either, is no news; why it did not come is.
        raise _in_words(source, error.__cause__) from None
    except (CLIENT_ERROR, ConnectionError) as error:
        raise _in_words(source, error) from None


def _in_words(source: Source, error: BaseException | None) -> DownloadError:
    repo, hub = source.repo, constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(
            f"{repo} is gated: accept {source.terms or 'its terms'} at {hub}/{repo} with your "
            f"account, make a token that may read gated repositories at {hub}/settings/tokens, "
            "and give it as HF_TOKEN or by 'hf auth login'"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return DownloadError(
            f"{repo}: not found at {hub}, or not visible without a valid token (HF_TOKEN or "
            "'hf auth login')"
        )
    if isinstance(error, (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)):
        return DownloadError(
            f"{repo}: the pinned commit {source.revision} is not there any more, or lacks a file: "
            f"{str(error).splitlines()[0]}"
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        wrong = "; the token (HF_TOKEN or 'hf auth login') is not valid" if status == 401 else ""
        return DownloadError(f"{repo}: the hub answered with status {status}{wrong}")
    if constants.HF_HUB_OFFLINE:
        return OfflineError(f"HF_HUB_OFFLINE is set, so {hub} is not asked; unset it to download")
    return OfflineError(f"no connection to {hub}")
