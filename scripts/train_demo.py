"""Train the demo model: a tiny PRXPixel and a tiny Qwen3 text encoder, on pictures that demo_pictures.py draws.

    python scripts/train_demo.py            # writes demo/diffusion_models, demo/text_encoders and docs/images
    python scripts/train_demo.py --help

Noise as PRXPixel has it: x_t = (1 - t) * x0 + t * 2 * noise, t in 0..1; the transformer returns x0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import demo_pictures
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from nativedit.ldm.prx.model import PRXTransformer2DModel
from nativedit.text_encoders.language_model import LanguageModel

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "demo"
TRANSFORMER_FILE = "diffusion_models/nativedit_demo_prx_pixel.safetensors"
TEXT_ENCODER_FILE = "text_encoders/nativedit_demo_qwen3.safetensors"

NOISE_SCALE = 2.0
SHIFT = 3.0
MAX_TOKENS = 24
BATCH, WARMUP = 16, 100  # pictures per step; steps until the full learning rate

TRANSFORMER_CONFIG = {
    "in_channels": 3,
    "patch_size": 8,
    "context_in_dim": 128,
    "hidden_size": 192,
    "mlp_ratio": 2.0,
    "num_heads": 6,
    "depth": 4,
    "axes_dim": [16, 16],
    "theta": 10000,
    "time_factor": 1000.0,
    "time_max_period": 10000,
    "bottleneck_size": 64,
    "resolution_embeds": True,
}
PLACES = ("middle", "left", "right", "top", "bottom")
ATTRIBUTES = (tuple(demo_pictures.RADII), demo_pictures.OBJECT_COLOURS, demo_pictures.SHAPES)
VOCABULARY = ["<pad>", "<unk>", *demo_pictures.WORDS]
TEXT_ENCODER_CONFIG = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "qk_norm": True,
    "causal": True,
    "rope_theta": 5000000.0,
}

SHEET_PROMPTS = (
    "a large red circle left of a small blue square on a white background",
    "a small yellow ring above a large purple triangle on a black background",
    "a large green triangle on a pink background",
    "a small white square below a large orange circle on a gray background",
    "a large blue ring right of a small red triangle on a white background",
    "a small green circle on a black background",
    "a large yellow square left of a large blue circle on a gray background",
    "a large black ring on a white background",
    "a small purple square above a small orange ring on a pink background",
    "a large white triangle right of a small yellow circle on a black background",
    "a small red square left of a small green triangle on a gray background",
    "a large orange circle below a small black ring on a pink background",
)


def make_tokenizer() -> Tokenizer:
    """One token per known word, in lower case; any other is <unk>. Nothing is added, so "" has no tokens."""
    vocabulary = {word: index for index, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def tokenize(tokenizer: Tokenizer, prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [B, MAX_TOKENS], zero-padded on the right, and the mask of real tokens, bool of the same shape."""
    ids = torch.zeros(len(prompts), MAX_TOKENS, dtype=torch.long)
    mask = torch.zeros(len(prompts), MAX_TOKENS, dtype=torch.bool)
    for row, encoding in enumerate(tokenizer.encode_batch(list(prompts), add_special_tokens=False)):
        tokens = encoding.ids[:MAX_TOKENS]
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        mask[row, : len(tokens)] = True
    return ids, mask


class DemoModel(torch.nn.Module):
    """The transformer, and the text encoder, which is trained alone and then kept as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = PRXTransformer2DModel(**TRANSFORMER_CONFIG)
        self.text_encoder = LanguageModel(**TEXT_ENCODER_CONFIG)
        for name, parameter in self.named_parameters():
            if name.startswith("text_encoder") and parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.05)
            elif ".modulation.lin" in name or ".adaLN_modulation" in name or ".final_layer.linear" in name:
                torch.nn.init.zeros_(parameter)
                if name.endswith("modulation.lin.bias"):  # open gates: text is read from the first step on
                    for gate in (2, 5):
                        torch.nn.init.ones_(parameter.data.chunk(6)[gate])

    def forward(self, x: torch.Tensor, t: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            context = self.text_encoder(ids, attention_mask=mask)
        return self.transformer(x, t, context, attention_mask=mask)


def sigmas(steps: int) -> list[float]:
    """The schedule that ComfyUI calls "simple", for a flow model with shift 3: steps + 1 values, 1.0 to 0.0."""
    table = [SHIFT * u / (1 + (SHIFT - 1) * u) for u in (i / 1000 for i in range(1, 1001))]
    return [table[-(1 + int(k * 1000 / steps))] for k in range(steps)] + [0.0]


@torch.inference_mode()
def sample(
    transformer: torch.nn.Module,
    text_encoder: torch.nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    seed: int = 0,
    steps: int = 20,
    cfg: float = 2.0,
) -> np.ndarray:
    """Euler with guidance against the empty prompt. Returns pictures [N, 64, 64, 3], float32 in 0..1."""
    count, side = len(prompts), demo_pictures.SIDE
    ids, mask = tokenize(tokenizer, prompts)
    context = text_encoder(ids, attention_mask=mask)
    context = torch.cat([context, torch.zeros_like(context)])
    mask = torch.cat([mask, torch.zeros_like(mask)])
    schedule = sigmas(steps)
    x = NOISE_SCALE * torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))
    for sigma, following in itertools.pairwise(schedule):
        t = torch.full((2 * count,), sigma)
        prompted, empty = transformer(torch.cat([x, x]), t, context, attention_mask=mask).chunk(2)
        x0 = empty + cfg * (prompted - empty)
        x = x + (following - sigma) * (x - x0) / max(sigma, 0.05)
    return (x.clamp(-1, 1) / 2 + 0.5).permute(0, 2, 3, 1).numpy()


def save(model: DemoModel, folder: Path) -> None:
    """Write both files in bfloat16, each with its constructor's arguments and its licence in the header."""

    def write(name: str, tensors: dict[str, torch.Tensor], config: dict, title: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        metadata = {
            "format": "pt",
            "config": json.dumps(config),
            "nativedit.architecture": "prx_pixel",
            "modelspec.sai_model_spec": "1.0.0",
            "modelspec.title": title,
            "modelspec.author": "NativeDiT",
            "modelspec.license": "GPL-3.0-or-later",
            "modelspec.description": "Trained by scripts/train_demo.py on drawn pictures; see demo/README.md.",
        }
        save_file(tensors, folder / name, metadata)

    def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {key: value.to(torch.bfloat16).contiguous() for key, value in module.state_dict().items()}

    write(TRANSFORMER_FILE, state(model.transformer), {"transformer": TRANSFORMER_CONFIG}, "NativeDiT demo PRXPixel")
    tokenizer = torch.frombuffer(bytearray(make_tokenizer().to_str().encode()), dtype=torch.uint8)
    tensors = state(model.text_encoder) | {"tokenizer_json": tokenizer}
    write(TEXT_ENCODER_FILE, tensors, {"text_encoder": TEXT_ENCODER_CONFIG}, "NativeDiT demo text encoder")


def load(folder: Path) -> tuple[PRXTransformer2DModel, LanguageModel, Tokenizer]:
    """The saved pair in float32, built from the files alone."""

    def config(name: str, key: str) -> dict:
        with safe_open(folder / name, "pt") as file:
            return json.loads(file.metadata()["config"])[key]

    transformer = PRXTransformer2DModel(**config(TRANSFORMER_FILE, "transformer"))
    transformer.load_state_dict(load_file(folder / TRANSFORMER_FILE))
    tensors = load_file(folder / TEXT_ENCODER_FILE)
    tokenizer = Tokenizer.from_str(bytes(tensors.pop("tokenizer_json").numpy()).decode())
    text_encoder = LanguageModel(**config(TEXT_ENCODER_FILE, "text_encoder"))
    text_encoder.load_state_dict(tensors)
    return transformer.eval(), text_encoder.eval(), tokenizer


def score(parts: tuple, count: int, seed: int) -> tuple[float, list[tuple[str, list[str]]]]:
    """Share of held-out prompts whose picture is fully right, and what is wrong with the others."""
    prompts = demo_pictures.held_out_prompts(count, seed)
    wrong = []
    for prompt, picture in zip(prompts, sample(*parts, prompts, seed=seed), strict=True):
        if problems := demo_pictures.check(picture, prompt):
            wrong.append((prompt, problems))
    return 1 - len(wrong) / count, wrong


def train_text_encoder(encoder: LanguageModel, steps: int = 800, rate: float = 1.5e-3, seed: int = 1) -> None:
    """Teach the text encoder to say from a prompt's last token what lies where; the classifier is then dropped.

    Diffusion models are given trained text encoders. The few pixels of a thing teach words far too slowly.
    """
    rng = np.random.default_rng(seed)
    tokenizer = make_tokenizer()
    sizes = [len(demo_pictures.GROUND_COLOURS), *(1 + len(words) for _ in PLACES for words in ATTRIBUTES)]
    classifier = torch.nn.Linear(TEXT_ENCODER_CONFIG["hidden_size"], sum(sizes))
    optimizer = torch.optim.AdamW([*encoder.parameters(), *classifier.parameters()], lr=rate, betas=(0.9, 0.98))

    def read(scenes: list[demo_pictures.Scene], prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the questions' cross entropies, and the share of prompts with every answer right."""
        ids, mask = tokenize(tokenizer, prompts)
        last = mask.sum(1) - 1
        longest = int(last.max()) + 1
        states = encoder(ids[:, :longest], attention_mask=mask[:, :longest])
        answers = classifier(states[torch.arange(len(last)), last]).split(sizes, dim=1)
        labels = torch.tensor([what_lies_where(scene) for scene in scenes])
        entropies = [F.cross_entropy(answer, label) for answer, label in zip(answers, labels.T, strict=True)]
        chosen = torch.stack([answer.argmax(1) for answer in answers], dim=1)
        return torch.stack(entropies).sum(), (chosen == labels).all(dim=1).float().mean()

    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = rate * min(step / 50, 1, 2 * (1 - step / (steps + 1)))
        scenes = [demo_pictures.random_scene(rng) for _ in range(64)]
        loss, right = read(scenes, [demo_pictures.describe(scene, rng) for scene in scenes])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"text {step} loss {loss.item():.3f}, read right: {right:.0%}", flush=True)
    with torch.no_grad():
        scenes = [demo_pictures.random_scene(rng, held_out=True) for _ in range(300)]
        _, right = read(scenes, [demo_pictures.describe(scene) for scene in scenes])
    print(f"held-out prompts read right: {right:.0%}", flush=True)


def what_lies_where(scene: demo_pictures.Scene) -> list[int]:
    """Index of the ground, then size, colour and shape at each of PLACES, 0 where nothing lies."""
    places = {None: (0,), "left of": (1, 2), "right of": (2, 1), "above": (3, 4), "below": (4, 3)}[scene.relation]
    labels = [[0] * len(ATTRIBUTES) for _ in PLACES]
    for place, thing in zip(places, scene.things, strict=True):
        values = (thing.size, thing.colour, thing.shape)
        labels[place] = [1 + words.index(value) for words, value in zip(ATTRIBUTES, values, strict=True)]
    return [demo_pictures.GROUND_COLOURS.index(scene.ground), *itertools.chain(*labels)]


def batch(tokenizer: Tokenizer, size: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures [B, 3, 64, 64] in -1..1 with token ids and mask; one prompt in ten is empty, for guidance."""
    scenes = [demo_pictures.random_scene(rng) for _ in range(size)]
    prompts = [demo_pictures.describe(scene, rng) if rng.random() > 0.1 else "" for scene in scenes]
    pictures = torch.from_numpy(demo_pictures.draw(scenes, rng)).permute(0, 3, 1, 2) * 2 - 1
    return pictures, *tokenize(tokenizer, prompts)


def loss_and_gradients(
    model: DemoModel,
    floor: float,
    x0: torch.Tensor,
    t: torch.Tensor,
    noise: torch.Tensor,
    ids: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[float, float, tuple[torch.Tensor, ...]]:
    """|x0 - output|^2 / max(t, floor)^2, the unweighted error where t > 0.85, and the gradients of the first."""
    longest = max(int(mask.sum(1).max()), 1)
    ids, mask = ids[:, :longest], mask[:, :longest]
    t_image = t[:, None, None, None]
    x = (1 - t_image) * x0 + t_image * NOISE_SCALE * noise
    error = (model(x, t, ids, mask) - x0).square().mean((1, 2, 3))
    # Where noise hides the things, the text decides: a low floor would drown that. It is for outlines, in a last leg.
    loss = (error / t.clamp(min=floor).square()).mean()
    return loss.item(), error[t > 0.85].mean().item(), torch.autograd.grad(loss, list(model.transformer.parameters()))


class Muon:
    """Momentum whose update is made orthogonal (Keller Jordan's Muon), for the matrices inside the blocks.

    On so few pictures it learns about twice as fast as AdamW. torch's own works in bfloat16, which is slow on a CPU.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter], momentum: float = 0.95) -> None:
        self.weights, self.momentum = list(weights), momentum
        self.buffers = [torch.zeros_like(weight) for weight in self.weights]

    def step(self, rate: float, pool: ThreadPoolExecutor) -> None:
        list(pool.map(lambda pair: self._update(*pair, rate), zip(self.weights, self.buffers, strict=True)))

    @torch.no_grad()
    def _update(self, weight: torch.nn.Parameter, buffer: torch.Tensor, rate: float) -> None:
        buffer.mul_(self.momentum).add_(weight.grad)
        update = orthogonal(weight.grad + self.momentum * buffer)
        weight.add_(update, alpha=-0.2 * rate * max(weight.shape) ** 0.5)  # about as large as AdamW's updates


def orthogonal(gradient: torch.Tensor, rounds: int = 4) -> torch.Tensor:
    """Nearly the orthogonal matrix closest to ``gradient``, by Newton-Schulz iterations of the fifth order."""
    x = gradient / (gradient.norm() + 1e-7)
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(rounds):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


@dataclass(frozen=True)
class Leg:
    """One run of the optimizer with its own warm-up and decay. floor: smallest t in the weight of the loss."""

    steps: int
    rate: float
    floor: float


# Each leg after the first goes on from the saved files of the one before. The last looks at outlines.
LEGS = (Leg(4500, 2e-3, 0.5), Leg(2500, 1.2e-3, 0.5), Leg(1700, 1e-3, 0.2))


def train(args: argparse.Namespace, number: int) -> DemoModel:
    """Muon and AdamW on `loss_and_gradients` for one of LEGS. Returns the moving average of the weights."""
    leg = LEGS[number]
    torch.manual_seed(number)
    rng = np.random.default_rng(number)
    tokenizer = make_tokenizer()
    model, average = DemoModel(), DemoModel().requires_grad_(False)
    if number == 0:
        train_text_encoder(model.text_encoder)
    else:
        transformer, text_encoder, _ = load(args.output)
        model.transformer.load_state_dict(transformer.state_dict())
        model.text_encoder.load_state_dict(text_encoder.state_dict())
    model.text_encoder.requires_grad_(False)
    average.load_state_dict(model.state_dict())
    weights = list(model.transformer.parameters())
    inner = [p for name, p in model.transformer.blocks.named_parameters() if p.ndim == 2 and "modulation" not in name]
    outer = [p for p in weights if all(p is not other for other in inner)]
    muon, adam = Muon(inner), torch.optim.AdamW(outer, lr=leg.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    started, losses = time.monotonic(), []
    # Threads over pictures and not within a layer: far fewer places to wait for each other.
    pool = ThreadPoolExecutor(args.threads, initializer=torch.set_num_threads, initargs=(1,))
    for step in range(1, leg.steps + 1):
        progress = step / leg.steps
        rate = leg.rate * min(step / WARMUP, 0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
        adam.param_groups[0]["lr"] = rate
        x0, ids, mask = batch(tokenizer, BATCH, rng)
        u = (torch.arange(BATCH) + torch.rand(BATCH)) / BATCH
        t = SHIFT * u / (1 + (SHIFT - 1) * u)
        noise = torch.randn_like(x0)
        # Strided, so that every part has timesteps of all sizes.
        parts = [[tensor[i :: args.threads] for tensor in (x0, t, noise, ids, mask)] for i in range(args.threads)]
        results = list(pool.map(lambda part: loss_and_gradients(model, leg.floor, *part), parts))
        for parameter, *gradients in zip(weights, *(r[2] for r in results), strict=True):
            parameter.grad = sum(gradients) / args.threads
        torch.nn.utils.clip_grad_norm_(outer, 1.0)
        muon.step(1.5 * rate, pool)
        adam.step()
        decay = min(0.999, (1 + step) / (20 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.transformer.parameters()), weights, 1 - decay)
        losses.append(np.mean([r[:2] for r in results], axis=0))
        if step % 50 == 0:
            mean, noisy = np.mean(losses[-50:], axis=0)
            print(f"{step} loss {mean:.4f}, t > 0.85: {noisy:.4f}, {time.monotonic() - started:.0f} s", flush=True)
        if args.check_every and step % args.check_every == 0:
            save(average, args.output)
            right, _ = score(load(args.output), 60, seed=1)
            print(f"{step} right {right:.0%} {time.monotonic() - started:.0f} s", flush=True)
    return average


def write_images(folder: Path) -> None:
    """docs/images: one picture enlarged, and a sheet of pictures under their prompts."""
    pictures = sample(*load(folder), SHEET_PROMPTS, seed=0)
    for prompt, picture in zip(SHEET_PROMPTS, pictures, strict=True):
        print(prompt, demo_pictures.check(picture, prompt) or "right")
    images = [Image.fromarray((picture * 255).round().astype(np.uint8)) for picture in pictures]
    docs = ROOT / "docs" / "images"
    docs.mkdir(parents=True, exist_ok=True)
    images[0].resize((512, 512), Image.Resampling.NEAREST).save(docs / "demo.png", optimize=True)
    columns, side, gap, caption = 4, 192, 16, 40
    rows = len(images) // columns
    sheet = Image.new("RGB", (columns * (side + gap) + gap, rows * (side + gap + caption) + gap), (246, 246, 246))
    pen = ImageDraw.Draw(sheet)
    for index, (prompt, image) in enumerate(zip(SHEET_PROMPTS, images, strict=True)):
        x, y = gap + index % columns * (side + gap), gap + index // columns * (side + gap + caption)
        sheet.paste(image.resize((side, side), Image.Resampling.NEAREST), (x, y))
        pen.multiline_text((x, y + side + 6), _wrapped(prompt, 34), fill=(50, 50, 50))
    sheet.save(docs / "demo_sheet.png", optimize=True)


def _wrapped(text: str, width: int) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check-every", type=int, default=500, help="steps between saved, checked states; 0: none")
    parser.add_argument("--output", type=Path, default=DEMO, help="folder for the two files")
    parser.add_argument("--images-only", action="store_true", help="only draw docs/images with the saved files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.images_only:
        for number in range(len(LEGS)):
            save(train(args, number), args.output)
        right, wrong = score(load(args.output), 60, seed=2)
        for prompt, problems in wrong:
            print(f"{prompt}: {'; '.join(problems)}")
        print(f"right on held-out prompts: {right:.0%}")
    if args.output == DEMO:
        write_images(args.output)


if __name__ == "__main__":
    main()
