"""Attention alone, by each backend, in the shapes of each family's evaluation: ms, TFLOP/s, error.

    python scripts/bench_attention.py --json attention.json           # one card, under a minute
    python scripts/bench_attention.py --json attention.json --tiny    # on the CPU, seconds

Queries, keys and values are bfloat16 ``[B, tokens, heads, D]``, as the engine's kernels leave them,
and the answer is ``[B, tokens, heads * D]``, contiguous, as its products take it: copies that a
backend needs in between are in its time. Queries and keys are normed over heads, as behind QK norm;
``peaked`` has queries four times as large. Errors are relative to float32's own attention, of one
sample. Two shapes are then measured inside torch.compile's full graph, and that as a CUDA graph.
A backend that does not work has a row that says why. The file is written after every row.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import measuring
import program
from g2rpo_ray.models.attention import flash3

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Kernels = Callable[[], AbstractContextManager[Any]]
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Shape:
    """Of one attention; classifier-free guidance is in the batch."""

    model: str
    what: str
    batch: int
    tokens: int
    heads: int
    head_dim: int
    compiled: bool = False
    """Whether it is also measured compiled, which takes seconds a backend."""

    @property
    def tflop(self) -> float:
        """Both products."""
        return 4 * self.batch * self.heads * self.tokens**2 * self.head_dim / 1e12


SHAPES = (
    # 720 x 720 pixels: 45 x 45 tokens and 512 of T5.
    Shape("FLUX.1-dev", "720px", 8, 45**2 + 512, 24, 128, compiled=True),
    Shape("FLUX.1-dev", "720px", 12, 45**2 + 512, 24, 128),
    # configs/sd3_5_medium_g2rpo_hps_lora.yaml; text is 77 tokens of CLIP and 128 of T5.
    Shape("stable-diffusion-3.5-medium", "512px joint", 48, 32**2 + 205, 24, 64, compiled=True),
    Shape("stable-diffusion-3.5-medium", "512px second attention", 48, 32**2, 24, 64),
    Shape("stable-diffusion-3.5-medium", "512px joint, T5 256", 48, 32**2 + 77 + 256, 24, 64),
    Shape("stable-diffusion-3.5-medium", "512px joint, T5 512", 48, 32**2 + 77 + 512, 24, 64),
    Shape("stable-diffusion-3.5-medium", "1024px joint", 8, 64**2 + 333, 24, 64),
    Shape("stable-diffusion-3.5-medium", "1024px second attention", 8, 64**2, 24, 64),
    Shape("stable-diffusion-3.5-large", "512px", 24, 32**2 + 77 + 128, 38, 64),
    Shape("stable-diffusion-3.5-large", "1024px", 8, 64**2 + 77 + 256, 38, 64),
    # Positive and negative text differ in length: a call each.
    Shape("Qwen-Image", "512px, long text", 8, 32**2 + 256, 24, 128),
    Shape("Qwen-Image", "512px, short text", 8, 32**2 + 40, 24, 128),
    # Text is filled up to a multiple of 32.
    Shape("Z-Image", "512px, long text", 32, 32**2 + 512, 30, 128),
    Shape("Z-Image", "512px, short text", 32, 32**2 + 64, 30, 128),
    Shape("FLUX.2-klein-base-4B", "512px", 32, 32**2 + 512, 24, 128),
    Shape("FLUX.2-klein-base-9B", "512px", 32, 32**2 + 512, 32, 128),
)
TINY = (Shape("tiny", "", 2, 40, 2, 64, compiled=True),)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's, which has heads before tokens: views of the same memory."""
    answer = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return answer.transpose(1, 2)


@torch.library.custom_op("g2rpo_ray::bench_flash3_float8", mutates_args=())
def flash3_float8(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor
) -> Tensor:
    """FlashAttention-3 of float8 numbers; what 1 stands for is float32 ``[B, heads]``."""
    scale = q.shape[-1] ** -0.5
    out: Tensor = torch.ops.fa3_fwd.fwd(
        q, k, v, q_descale=q_scale, k_descale=k_scale, v_descale=v_scale,
        softmax_scale=scale, num_splits=1,
    )[0]  # fmt: skip
    return out


@flash3_float8.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *scales: Tensor) -> Tensor:  # noqa: ARG001
    return q.new_empty(q.shape, dtype=torch.bfloat16)


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded by the largest number of every sample's head, and what 1 stands for."""
    scale = x.abs().amax(dim=(1, 3)).float().clamp(min=1e-12) / torch.finfo(FLOAT8).max
    return (x.float() / scale[:, None, :, None]).to(FLOAT8), scale


def rounding_flash3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-3 of bfloat16 numbers by way of float8."""
    (q, q_scale), (k, k_scale), (v, v_scale) = map(to_float8, (q, k, v))
    return flash3_float8(q, k, v, q_scale, k_scale, v_scale)


def only(kernel: SDPBackend) -> Kernels:
    """PyTorch may choose no other."""
    return lambda: sdpa_kernel(kernel)


def with_flash3() -> AbstractContextManager[Any]:
    """The package's operators become known; an ImportError says what is wrong with it."""
    import fa3_fwd_interface  # noqa: F401

    return nullcontext()


BACKENDS: dict[str, tuple[Attention, Kernels]] = {
    "cudnn": (sdpa, only(SDPBackend.CUDNN_ATTENTION)),
    "flash": (sdpa, only(SDPBackend.FLASH_ATTENTION)),
    "flash3": (flash3, with_flash3),
    "flash3 float8, rounding included": (rounding_flash3, with_flash3),
}
FLOAT8_ALONE = "flash3 float8, kernel alone"


def inputs(
    shape: Shape, batch: int, device: torch.device, sharpness: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Bfloat16 queries, keys, values; ``sharpness`` is the logits' standard deviation."""
    size = (batch, shape.tokens, shape.heads, shape.head_dim)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(size, device=device, generator=generator) for _ in "qkv")
    q, k = (rms_norm(x, size[-1:]) for x in (q, k))
    return (q * sharpness).bfloat16(), k.bfloat16(), v.bfloat16()


def joined(attention: Attention) -> Attention:
    """As the engine's products take it."""
    return lambda q, k, v: attention(q, k, v).flatten(2).contiguous()


def each_ms(run: Callable[[], object], device: torch.device, seconds: float = 0.15) -> float:
    """Milliseconds of a call among many, so that the host's time is hidden: the median of five."""
    first_s = measuring.median_s(run, 1, warm_up=2)
    calls = max(1, min(50, int(seconds / 5 / first_s)))

    def many() -> None:
        for _ in range(calls):
            run()

    if device.type == "cpu":
        return 1e3 * measuring.median_s(many, 5, warm_up=0) / calls
    found = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        many()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / calls)
    return median(found)


def errors(attention: Attention, kernels: Kernels, shape: Shape, device: torch.device) -> Any:
    """Relative to float32, of one sample: of all numbers, and of the worst token of a head."""
    found = {}
    for name, sharpness in {"error": 1.0, "error, peaked": 4.0}.items():
        q, k, v = inputs(shape, 1, device, sharpness)
        with sdpa_kernel(SDPBackend.MATH):
            exact = sdpa(q.float(), k.float(), v.float())
        with kernels():
            apart = attention(q, k, v).float() - exact
        found[name] = (apart.norm() / exact.norm()).item()
        found[f"{name}, worst token"] = (apart.norm(dim=-1) / exact.norm(dim=-1)).max().item()
    return found


def compiled(
    attention: Attention, kernels: Kernels, shape: Shape, device: torch.device
) -> Iterator[dict[str, Any]]:
    """The call between other operators in one graph of torch.compile, then as a CUDA graph: their
    times, and whether all three answer with the same bits."""
    qkv = inputs(shape, shape.batch, device)

    def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return joined(attention)(2 * q, 0.5 * k, v) + 1

    with kernels():
        eager = around(*qkv)
        yield {"eager_ms": each_ms(lambda: around(*qkv), device)}
        torch.compiler.reset()
        # The CPU's compiler takes a minute, and has nothing to do with a card's.
        compiler = "inductor" if device.type == "cuda" else "aot_eager"
        whole = torch.compile(around, fullgraph=True, dynamic=False, backend=compiler)
        took_s, answer = measuring.timed(lambda: whole(*qkv))
        yield {"compile_s": took_s, "compiled as eager": torch.equal(answer, eager)}
        yield {"compiled_ms": each_ms(lambda: whole(*qkv), device)}
        if device.type == "cpu":
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = whole(*qkv)
        recorded.zero_()
        graph.replay()
        torch.cuda.synchronize()
        yield {"recorded as compiled": torch.equal(recorded, answer)}
        yield {"recorded_ms": each_ms(graph.replay, device)}


def measured(
    attention: Attention, kernels: Kernels, shape: Shape, device: torch.device
) -> Iterator[dict[str, Any]]:
    """What is found, stage by stage."""
    qkv = inputs(shape, shape.batch, device)
    with kernels():
        copies = not attention(*qkv).is_contiguous()
        ms = each_ms(lambda: joined(attention)(*qkv), device)
    yield {"ms": ms, "TFLOP/s": shape.tflop / ms * 1e3, "copies": copies}
    yield errors(attention, kernels, shape, device)


def measured_float8_alone(shape: Shape, device: torch.device) -> Iterator[dict[str, Any]]:
    """The kernel of float8 numbers that are there already."""
    with with_flash3():
        (q, q_scale), (k, k_scale), (v, v_scale) = map(
            to_float8, inputs(shape, shape.batch, device)
        )
        ms = each_ms(lambda: flash3_float8(q, k, v, q_scale, k_scale, v_scale), device)
    yield {"ms": ms, "TFLOP/s": shape.tflop / ms * 1e3}


class Results:
    """Rows in the file, and as they come on the screen."""

    def __init__(self, path: Path, limit_s: float, facts: dict[str, Any]) -> None:
        self.path, self.ends_s = path, time.monotonic() + limit_s
        self.content = facts | {"rows": []}
        print(facts)

    def row(
        self, shape: Shape, backend: str, parts: Iterator[dict[str, Any]], how: str = "alone"
    ) -> None:
        """What a backend cannot do is told in the row, and the next one goes on."""
        row: dict[str, Any] = {
            "model": shape.model, "what": shape.what, "batch": shape.batch, "tokens": shape.tokens,
            "heads": shape.heads, "head_dim": shape.head_dim, "backend": backend, "how": how,
        }  # fmt: skip
        names = len(row)
        self.content["rows"].append(row)
        try:
            if time.monotonic() > self.ends_s:
                raise TimeoutError("not measured: no time was left (--limit-s)")
            for part in parts:
                row |= part
        except Exception as error:  # noqa: BLE001  (of whatever library: it is told in the row)
            row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
        measuring.write_json(self.path, self.content)
        told = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        print(*list(told.values())[:names], *(f"{k}={told[k]}" for k in list(told)[names:]))


def main() -> None:
    parser = measuring.make_parser(__doc__, needs_file=True)
    parser.add_argument("--tiny", action="store_true", help="small numbers, on the CPU")
    parser.add_argument("--limit-s", type=float, default=55.0, help="of everything (55)")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("no CUDA card here; --tiny runs the same code on the CPU")
    device = torch.device("cpu" if options.tiny else "cuda")
    side, began_s = 512 if options.tiny else 8192, time.monotonic()
    facts: dict[str, Any] = {
        "card": measuring.card_name(device), "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "matrix TFLOP/s": 2e-12 * side**3 / measuring.matrix_s(side, torch.bfloat16, device),
    }  # fmt: skip
    results = Results(options.json, options.limit_s, facts)
    shapes = TINY if options.tiny else SHAPES
    with torch.no_grad():
        for shape in shapes:
            for name, (attention, kernels) in BACKENDS.items():
                results.row(shape, name, measured(attention, kernels, shape, device))
            results.row(shape, FLOAT8_ALONE, measured_float8_alone(shape, device))
        for shape in shapes:
            for name, (attention, kernels) in BACKENDS.items() if shape.compiled else ():
                # The cache of compiled code does not ask which kernel of SDPA was chosen.
                torch.compiler.config.cache_key_tag = name
                parts = compiled(attention, kernels, shape, device)
                results.row(shape, name, parts, how="compiled")
    print(f"{time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    program.run(main)
