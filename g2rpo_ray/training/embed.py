"""Before training: prompts to a folder of embeddings, with Ray Data, once for many runs."""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from g2rpo_ray.cluster.connect import ray_cluster
from g2rpo_ray.cluster.demand import Demand, living_nodes, shortage
from g2rpo_ray.cluster.placement import placed
from g2rpo_ray.common.device import describe_device
from g2rpo_ray.common.errors import InputError, RunError
from g2rpo_ray.common.files import (
    check_room,
    read_json_object,
    replace_text,
    replacing,
    sha256_of_file,
    sole_writer,
    writing,
)
from g2rpo_ray.common.formatting import format_seconds, format_size
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.prompt_text import metadata_of
from g2rpo_ray.common.section import check_gpus
from g2rpo_ray.common.stop import StopSignal
from g2rpo_ray.config import Config
from g2rpo_ray.models.families import negative_prompt, open_family
from g2rpo_ray.models.loading import check_model
from g2rpo_ray.prompts.dataset import cut_words
from g2rpo_ray.prompts.embeddings import (
    Manifest,
    ShardFile,
    embedding_bytes,
    encoder_fingerprint,
    write_manifest,
)
from g2rpo_ray.prompts.encoder import SHARD_FILE, ShardEncoder
from g2rpo_ray.prompts.reading import MANIFEST, METADATA, PROMPTS_FILE, UNFINISHED, read_prompts
from g2rpo_ray.prompts.selection import Selection, select
from g2rpo_ray.run.paths import check_outside_states

FINISHED = "finished.jsonl"
"""Which shards of an unfinished folder are whole."""


class EmbedError(InputError):
    """The folder cannot be written as asked; the message says what to do."""


@dataclass(frozen=True)
class EmbedOptions:
    """Who encodes, and how the folder is cut."""

    workers: int = 1
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0
    """0 encodes on the CPU."""
    shard_size: int = 64
    """Prompts of a file; what a kill can lose of each worker's work."""

    def __post_init__(self) -> None:
        try:
            check_gpus(self.gpus_per_worker)
        except ValueError as error:
            raise EmbedError(f"--gpus-per-worker: {error}") from None
        if not self.cpus_per_worker >= 0:
            raise EmbedError(
                f"--cpus-per-worker: {self.cpus_per_worker:g} CPUs; 0 or more is needed"
            )


def embed(
    config: Config, source: str, folder: Path, selection: Selection, options: EmbedOptions
) -> Manifest:
    """Embed the prompts of ``source`` with the text encoders of ``config.model``.

    Shards that ``folder`` has already are not made again.

    Raises:
        EmbedError: ``folder`` holds something else or lies among checkpoints, its disk is too
            small, or a private Ray has no room for the workers.
        ClusterError: another Ray has none for them within ``cluster.start_timeout_s``.
        PromptFileError, SelectionError: the prompts cannot be used.
        RunError: a worker failed.
    """
    check_outside_states(folder, EmbedError, "--out")
    check_model(config)
    # With a length to select by, a longer prompt is left out instead of refused.
    longest = config.prompts.max_characters if selection.max_characters is None else None
    texts = read_prompts(resolve_path(source), longest, config.prompts.key)
    selected = select(texts, selection)
    reasons = "".join(f", {count} {reason}" for reason, count in selected.left_out.items())
    kept, size = selected.prompts, options.shard_size
    print(f"{source}: {len(texts)} prompts{reasons}; {len(kept)} kept", flush=True)
    device = describe_device(options.gpus_per_worker, "--gpus-per-worker")
    print(f"encoding on: {device}", flush=True)
    encoder = encoder_fingerprint(config.model)
    shards = [kept[first : first + size] for first in range(0, len(kept), size)]
    with sole_writer(folder, EmbedError, "--out"):
        finished = _open(folder, _plan(config, encoder, kept, size))
        missing = [n for n in range(len(shards)) if n not in finished]
        _check_disk(config, folder, {n: len(shards[n]) for n in missing})
        if missing:
            _encode(config, folder, {n: shards[n] for n in missing}, finished, options)
        files = [finished[number] for number in range(len(shards))]
        cut = [size for file in files for size in file.get("cut", ())]
        if told := cut_words(cut, len(kept), config.prompts.max_sequence_length):
            print(told, flush=True)
        manifest = Manifest(
            encoder=encoder,
            dtype=config.model.dtype,
            max_sequence_length=config.prompts.max_sequence_length,
            prompts=len(kept),
            source=source,
            left_out=selected.left_out,
            files=[ShardFile(f["file"], f["prompts"], f["bytes"], f["sha256"]) for f in files],
            prompts_sha256=_write_prompts(folder, shards, files),
            pipeline=open_family(resolve_path(config.model.path)).pipeline,
            negative_prompt=negative_prompt(config),
            negative_checksum=files[0].get("negative_checksum") if files else None,
        )
        write_manifest(folder, manifest)
        for name in (UNFINISHED, FINISHED):
            (folder / name).unlink(missing_ok=True)
        return manifest


def _encode(
    config: Config,
    folder: Path,
    shards: dict[int, list[str]],
    finished: dict[int, dict[str, Any]],
    options: EmbedOptions,
) -> None:
    total, done, started_s = sum(map(len, shards.values())), 0, None
    with (
        StopSignal("finished shards stay; the same command goes on from there") as stop,
        ray_cluster(config.cluster) as private,
        (folder / FINISHED).open("a", encoding="utf-8") as log,
    ):
        options = replace(options, workers=min(options.workers, len(shards)))
        _await_room(config, options, private)
        for row in _shard_rows(config, folder, shards, options):
            finished[row["shard"]] = row
            with writing(folder / FINISHED):
                log.write(json.dumps(row) + "\n")
                log.flush()
            done += row["prompts"]
            # From when the first shard was begun: loading the encoders is no throughput.
            started_s = started_s or time.perf_counter() - row["seconds"]
            rate = done / (time.perf_counter() - started_s)
            print(
                f"{done} of {total} prompts · {rate:.1f} prompts/s · "
                f"{format_seconds((total - done) / rate)} left",
                flush=True,
            )
            stop.check()


def _await_room(config: Config, options: EmbedOptions, private: bool) -> None:
    """Wait until the cluster has room for the workers; an autoscaler adds nodes for them."""
    resources = {"CPU": options.cpus_per_worker, "GPU": options.gpus_per_worker}
    demand = Demand("--workers", options.workers, resources)
    if private:
        # Nothing will join it.
        if reasons := shortage([demand], living_nodes()):
            raise EmbedError(" ".join(reasons))
    elif any(resources.values()):
        # Given back at once: Ray Data starts the workers there.
        with placed([demand], [], config.cluster.start_timeout_s, partial(print, flush=True)):
            pass


def _shard_rows(
    config: Config, folder: Path, shards: dict[int, list[str]], options: EmbedOptions
) -> Iterator[dict[str, Any]]:
    """What each worker says of its shards, as they are finished, in any order."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows = [{"shard": number, "texts": [*map(str, texts)]} for number, texts in shards.items()]
    encoded = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        ShardEncoder,
        fn_constructor_args=(config, folder.absolute(), options.gpus_per_worker),
        compute=ray.data.ActorPoolStrategy(size=options.workers),
        num_cpus=options.cpus_per_worker,
        num_gpus=options.gpus_per_worker,
    )
    try:
        for row in encoded.iter_rows():
            yield row | {
                "checksums": [str(checksum) for checksum in row["checksums"]],
                "cut": [int(size) for size in row["cut"]],
            }
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise RunError(
            f"embedding failed in a worker: {type(cause).__name__}: {cause}; finished shards stay, "
            "the same command goes on from there"
        ) from error


def _plan(
    config: Config, encoder: dict[str, str], texts: list[str], shard_size: int
) -> dict[str, Any]:
    """All that the shards' content depends on."""
    return {
        "encoder": encoder,
        "dtype": config.model.dtype,
        "max_sequence_length": config.prompts.max_sequence_length,
        "shard_size": shard_size,
        "prompts_sha256": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
        "negative_prompt": negative_prompt(config),
    }


def _open(folder: Path, plan: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Finished shards of a folder by number."""
    path = folder / UNFINISHED
    try:
        if not path.exists():
            if (folder / MANIFEST).exists():
                raise EmbedError(
                    f"{folder} holds embeddings already, complete; name another folder with --out"
                )
            if any(folder.iterdir()):
                raise EmbedError(f"{folder}: not empty; name another folder with --out")
            replace_text(path, json.dumps(plan, indent=1))
        earlier = read_json_object(path, EmbedError, "remove the folder, or name another --out")
        lines = (folder / FINISHED).read_text().splitlines() if (folder / FINISHED).exists() else []
    except (OSError, ValueError) as error:
        raise EmbedError(f"{folder}: cannot be used: {error}") from error
    differing = [key for key in plan if earlier.get(key) != plan[key]]
    if differing:
        raise EmbedError(
            f"{folder} was begun with other {', '.join(differing)}; name another folder with --out"
        )
    finished = {}
    for line in lines:
        try:
            row = json.loads(line)
            shard, number, size = folder / row["file"], row["shard"], row["bytes"]
        except (ValueError, KeyError, TypeError):
            # Half a line: the command was killed while it wrote it. The shard is made again.
            continue
        if shard.is_file() and shard.stat().st_size == size:
            finished[number] = row
    return finished


def _check_disk(config: Config, folder: Path, missing: dict[int, int]) -> None:
    """``missing``: number of prompts by shard."""
    prompts = sum(missing.values())
    wanted = prompts * embedding_bytes(config)
    print(f"{prompts} prompts to embed: {format_size(wanted)}")
    # Whole ones of which a kill left no word: they are written over.
    old = [file for n in missing if (file := folder / SHARD_FILE.format(n)).is_file()]
    wanted -= sum(file.stat().st_size for file in old)
    fewer = "fewer with --limit, smaller with prompts.max_sequence_length"
    check_room(folder, wanted, f"embeddings of {prompts} prompts ({fewer})")


def _write_prompts(
    folder: Path, shards: Sequence[Sequence[str]], files: Sequence[dict[str, Any]]
) -> str:
    rows = [
        {
            "text": str(text), "shard": number, "row": row,
            "checksum": files[number]["checksums"][row],
            METADATA: json.dumps(metadata_of(text), ensure_ascii=False),
        }
        for number, texts in enumerate(shards)
        for row, text in enumerate(texts)
    ]  # fmt: skip
    path = folder / PROMPTS_FILE
    with replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows), temporary)
    return sha256_of_file(path)
