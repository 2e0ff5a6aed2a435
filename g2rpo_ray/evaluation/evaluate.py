"""Any number of weights, step counts and rewards on the same prompts."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from g2rpo_ray.common.device import describe_device
from g2rpo_ray.common.files import check_room, replace_text, sole_writer
from g2rpo_ray.common.prompt_text import category_of, metadata_of
from g2rpo_ray.common.stop import StopSignal
from g2rpo_ray.config import Config
from g2rpo_ray.evaluation.draw import Drawing
from g2rpo_ray.evaluation.gallery import write_gallery
from g2rpo_ray.evaluation.records import Records, check_folder, picture_files
from g2rpo_ray.evaluation.rows import EvaluationError, Row, check_steps, make_rows, parse_weights
from g2rpo_ray.evaluation.table import (
    DIVERSITY,
    TableRow,
    category_part,
    column_names,
    make_table,
    markdown,
    table_parts,
    write_table_parquet,
)
from g2rpo_ray.models.catalogue import check_rewards
from g2rpo_ray.models.families import negative_prompt
from g2rpo_ray.models.loading import check_model
from g2rpo_ray.prompts.dataset import evenly, read_config_prompts
from g2rpo_ray.prompts.kept import KEPT
from g2rpo_ray.rewards.prompts import check_prompts
from g2rpo_ray.rewards.section import RewardSection
from g2rpo_ray.run.paths import check_outside_states, run_folder
from g2rpo_ray.training.roles import launch_rollout
from g2rpo_ray.training.settings import at_deployment_size, png_files, size_words

PINS = "weights"
"""Folder, inside the evaluation's, of the weights that it still draws with, by label."""


def evaluate(
    config: Config,
    *,
    checkpoints: Sequence[str],
    steps: Sequence[int],
    hybrids: Sequence[float] = (),
    folder: Path,
) -> list[TableRow]:
    """Draw, score and compare; what ``folder`` has already is not drawn again.

    Args:
        checkpoints: ``[LABEL=]last|best|base|PATH``.
        steps: step counts, each in a row of its own.
        hybrids: shares of the steps that the trained weights make before the base model goes on.
        folder: gets pictures, scores.parquet, table.parquet, table.md and gallery.html.

    Raises:
        EvaluationError: something asked for cannot be; the folder belongs to another evaluation,
            or lies among checkpoints.
        DiskError: the folder's disk has no room for the pictures.
    """
    check_steps(steps, hybrids)
    check_model(config)
    check_rewards(config)
    config = _with_diversity(at_deployment_size(config))
    check_outside_states(folder, EvaluationError, "--out")
    check_folder(folder)
    heldout = read_config_prompts(config, config.prompts.heldout)
    stop = config.advantage.on_invalid == "stop"
    check_prompts(config.rewards, heldout, "prompts.heldout", stop)
    prompts = evenly(list(enumerate(heldout)), config.evaluation.prompts)
    with sole_writer(folder, EvaluationError, "--out"):
        pins, before = folder / PINS, set((folder / PINS).glob("*"))
        try:
            weights = parse_weights(config, checkpoints, pins)
            rows = make_rows(weights, steps, hybrids)
            wanted = len(rows) * len(prompts) * config.evaluation.pictures_per_prompt
            there = picture_files(folder, [row.name for row in rows])
            files = png_files(config, max(0, wanted - len(there)))
            fewer = "fewer with evaluation.prompts or evaluation.pictures_per_prompt"
            check_room(folder, files.size_bytes, f"{files.words} ({fewer})")
            records = Records(folder, _request(config, rows, prompts))
        except BaseException:
            _unpin(set(pins.glob("*")) - before)
            if not before and pins.is_dir():
                # Else the folder would not be taken for a new one.
                pins.rmdir()
            raise
        for line in (known.told for known in weights if known.told):
            print(line)
        if missing := _missing(records, rows, prompts):
            for row in missing:
                if row.weights.checkpoint is not None and not row.weights.checkpoint.is_dir():
                    raise EvaluationError(
                        f"{row.name}: its weights are not there any more (see "
                        f"{row.weights.checkpoint}.json); give other ones another label, "
                        "--checkpoint LABEL=..., or another folder, --out"
                    )
            _draw(config, records, rows, prompts)
        if not _missing(records, rows, prompts):
            _unpin(path for path in pins.glob("*") if path.is_dir())
        return _write(config, records, rows, prompts)


def _missing(
    records: Records, rows: Sequence[Row], prompts: Sequence[tuple[int, str]]
) -> list[Row]:
    """Rows that lack a prompt or a score."""
    return [row for row in rows if any(not records.is_scored(row.name, n) for n, _ in prompts)]


def _unpin(pins: Iterable[Path]) -> None:
    for pin in pins:
        shutil.rmtree(pin) if pin.is_dir() else pin.unlink()


def _draw(
    config: Config, records: Records, rows: Sequence[Row], prompts: Sequence[tuple[int, str]]
) -> None:
    shown = -1

    def on_progress(done: int, total: int) -> None:
        nonlocal shown
        stop.check()
        if done != shown:
            print(f"{done} of {total} (row, prompt) drawn", flush=True)
            shown = done

    print(f"evaluating {size_words(config)} on: {_devices(config)}", flush=True)
    # Those that the run has made, and what it lacks beside the pictures.
    embeddings = [run_folder(config) / KEPT, records.folder.absolute() / KEPT]
    with (
        StopSignal("what is drawn stays; the same command goes on from there") as stop,
        launch_rollout(config, embeddings, print) as (encoder, pool),
    ):
        length = config.prompts.max_sequence_length
        if told := encoder.cut([text for _, text in prompts], length):
            print(told, flush=True)
        Drawing(config, encoder, pool, records, on_progress).run(rows, prompts)


def _devices(config: Config) -> str:
    gpus = {
        "rollout.gpus_per_worker": config.rollout.gpus_per_worker,
        "prompts.encoder_gpus": config.prompts.encoder_gpus,
    } | {f"rewards.{n}.gpus_per_replica": r.gpus_per_replica for n, r in config.rewards.items()}
    return ", ".join(describe_device(amount, setting) for setting, amount in gpus.items())


def _write(
    config: Config, records: Records, rows: Sequence[Row], prompts: Sequence[tuple[int, str]]
) -> list[TableRow]:
    folder, columns = records.folder, column_names(config.rewards)
    with_diversity = DIVERSITY in config.rewards
    table = make_table(rows, records, columns, with_diversity)
    categories = {number: known for number, text in prompts if (known := category_of(text))}
    records.write_parquet(rows, columns + [DIVERSITY] * with_diversity, categories)
    write_table_parquet(table, folder / "table.parquet")
    trained = list(config.trained_rewards)
    parts = table_parts(table, columns, trained, _protocol(config))
    by_category = category_part(rows, records, columns, trained, categories)
    parts += [by_category] if by_category.cells else []
    text = markdown(parts)
    replace_text(folder / "table.md", text)
    write_gallery(folder / "gallery.html", parts, rows, records, columns)
    print(f"\n{text}\n{folder / 'table.md'}\n{folder / 'gallery.html'}")
    return table


def _with_diversity(config: Config) -> Config:
    """Measure diversity, too, where a prompt has several pictures and there is a CLIP model."""
    clip = next((r for _, r in sorted(config.rewards.items()) if r.kind == "clip"), None)
    if config.evaluation.pictures_per_prompt < 2 or clip is None:
        return config
    diversity: RewardSection = clip.model_copy(update={"kind": DIVERSITY, "weight": 0.0})
    return config.model_copy(update={"rewards": config.rewards | {DIVERSITY: diversity}})


def _request(
    config: Config, rows: Sequence[Row], prompts: Sequence[tuple[int, str]]
) -> dict[str, object]:
    """All that the numbers depend on; a folder that was begun with another one is refused."""
    return {
        "rows": {row.name: row.weights.checksum for row in rows},
        "prompts": {str(number): text for number, text in prompts},
        "metadata": {str(n): dict(known) for n, text in prompts if (known := metadata_of(text))},
        "pictures_per_prompt": config.evaluation.pictures_per_prompt,
        # Without defaults: a setting that a later version adds does not end what was begun.
        "model": config.model.model_dump(mode="json", exclude_defaults=True),
        "sampling": {
            key: getattr(config.sampling, key)
            for key in ("height", "width", "schedule", "shift", "guidance")
        },
        # Only where there is one: folders begun before there were any go on.
        **({"negative_prompt": negative} if (negative := negative_prompt(config)) else {}),
        "max_sequence_length": config.prompts.max_sequence_length,
        "rewards": {
            name: {"kind": reward.kind, "options": reward.options}
            for name, reward in sorted(config.rewards.items())
        },
    }


def _protocol(config: Config) -> str:
    sampling, evaluation = config.sampling, config.evaluation
    negative = f" from {sampling.negative_prompt!r}" if sampling.negative_prompt else ""
    return (
        f"{sampling.width} x {sampling.height} pictures, {evaluation.pictures_per_prompt} of each "
        f"prompt from fixed noise, by ODE, {sampling.schedule} schedule, guidance "
        f"{sampling.guidance:g}{negative}; prompts: {config.prompts.heldout}"
    )
