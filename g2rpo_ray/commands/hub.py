"""Listing, fetching and checking files of the hub, through huggingface_hub."""

import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from g2rpo_ray.common.formatting import format_size
from g2rpo_ray.models.catalogue import DownloadError, Source, Target

DEFAULT_ENDPOINT = "https://huggingface.co"
_CHUNK = 1 << 20


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
            return _digest(path, hashlib.sha256()) == self.sha256
        return _digest(path, hashlib.sha1(b"blob %d\0" % self.size)) == self.git_sha1


@dataclass(frozen=True)
class Listing:
    """What is to be fetched for a target."""

    target: Target
    repo: str
    commit: str
    files: list[HubFile]

    def path_of(self, file: HubFile) -> Path:
        return self.target.folder / file.name


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")


def list_files(target: Target) -> Listing:
    """Ask the hub which files there are, with sizes and checksums.

    Raises:
        OfflineError: no connection, or HF_HUB_OFFLINE is set.
        DownloadError: no such repository or commit, or no access to it.
    """
    from huggingface_hub import HfApi

    source = target.source
    assert source is not None
    recorded = read_record(target)
    revision = source.revision or (recorded.commit if recorded else "main")
    with _explained(source):
        info = HfApi(endpoint()).model_info(source.repo, revision=revision, files_metadata=True)
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


def check_disk(missing: Sequence[tuple[Listing, HubFile]]) -> None:
    """Compare what is to come with what is free, disk by disk.

    Raises:
        DownloadError: a disk is too small.
    """
    wanted: dict[int, int] = defaultdict(int)
    folders: dict[int, Path] = {}
    for listing, file in missing:
        folder = listing.target.folder
        while not folder.exists():
            folder = folder.parent
        device = folder.stat().st_dev
        wanted[device] += file.size
        folders[device] = folder
    for device, size in wanted.items():
        free = shutil.disk_usage(folders[device]).free
        if size > free:
            raise DownloadError(
                f"the disk of {folders[device]} has {format_size(free)} free and "
                f"{format_size(size)} are to come; free some, or name folders on another disk"
            )


def fetch(listing: Listing, file: HubFile) -> None:
    """Fetch one file, going on where an earlier try was cut off, and compare its checksum.

    Raises:
        OfflineError: the connection broke.
        DownloadError: no access, or the file is not what the hub's list says.
    """
    from huggingface_hub import hf_hub_download

    path = listing.path_of(file)
    source = listing.target.source
    assert source is not None
    with _explained(source):
        hf_hub_download(
            listing.repo,
            file.name,
            revision=listing.commit,
            local_dir=listing.target.folder,
            endpoint=endpoint(),
            force_download=path.exists(),
        )
    if not file.is_whole(path):
        path.unlink(missing_ok=True)
        raise DownloadError(
            f"{path}: its checksum is not the one that {listing.repo} at {listing.commit} lists; "
            "it was removed. Try again; a proxy or mirror may change files"
        )


def write_record(listing: Listing) -> None:
    """Write down what lies there, so that it can be checked without the hub."""
    content = {"repo": listing.repo, "commit": listing.commit}
    files = [asdict(file) for file in listing.files]
    path = _record_path(listing.target)
    path.write_text(json.dumps(content | {"files": files}, indent=1))


def read_record(target: Target) -> Listing | None:
    """What an earlier download wrote down.

    Raises:
        DownloadError: the record is not readable.
    """
    path = _record_path(target)
    try:
        content = json.loads(path.read_text())
        files = [HubFile(**entry) for entry in content["files"]]
        return Listing(target, content["repo"], content["commit"], files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DownloadError(f"{path}: not readable: {error}; remove it") from error


def _record_path(target: Target) -> Path:
    return target.folder / f".{target.path.name}.g2rpo-download.json"


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Turn the hub's errors into words that help; none of them carries the token."""
    import httpx2
    from huggingface_hub import errors

    page = f"{endpoint()}/{source.repo}"
    try:
        yield
    except errors.GatedRepoError:
        raise DownloadError(
            f"{source.repo} is gated: accept {source.terms or 'its terms'} at {page} with your "
            "account, make a token that may read gated repositories at "
            f"{endpoint()}/settings/tokens, and give it as HF_TOKEN or by 'hf auth login'"
        ) from None
    except errors.RepositoryNotFoundError:
        raise DownloadError(
            f"{source.repo}: not found at {endpoint()}, or not visible without a valid token "
            "(HF_TOKEN or 'hf auth login')"
        ) from None
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise OfflineError(f"no connection to {endpoint()}") from None
        raise DownloadError(
            f"{source.repo}: the pinned commit {source.revision} is not there any more, or lacks a "
            f"file: {str(error).splitlines()[0]}"
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        raise DownloadError(f"{source.repo}: the hub answered with status {status}") from None
    except (errors.OfflineModeIsEnabled, ConnectionError, httpx2.TransportError):
        raise OfflineError(f"no connection to {endpoint()}") from None


def _digest(path: Path, digest: "hashlib._Hash") -> str:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
