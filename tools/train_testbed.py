"""Make the embedded testbed: text, tokenizer, target, MTP head and DFlash drafter, in the published layout.

On one GPU, about nine minutes a model (commands and logs of the committed weights: benchmarks/testbed-training.md):

    python tools/train_testbed.py dense --out OUT
    python tools/train_testbed.py moe --out OUT

On any CPU, in about a minute, models that are good for nothing but show that every step works:

    python tools/train_testbed.py dense --smoke --out OUT

Writes OUT/<name> (target), OUT/<name>-dflash (drafter), OUT/prompts/<workload>.jsonl and OUT/<name>.log.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from testbed_training import data, dflash, export, features, measure, mtp, target, text
from testbed_training import tokenizer as tok
from tokenizers import Tokenizer

from mxq.models.dflash import DFlashConfig


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and lengths of one training; every stage's number of steps fixes its time."""

    shape: export.Shape
    drafter: export.DrafterShape
    text_mix: dict[str, float]  # shares of the families in the target's text
    conversations: int
    row: int
    target_steps: int
    target_batch: int
    answers: int
    answer_batch: int
    mtp_steps: int
    mtp_batch: int
    mtp_chain: int  # entries trained in a row; released heads are trained with 1, used with more
    dflash_steps: int
    dflash_batch: int
    anchors: int
    held_out: int


PLANS = {
    "dense": Plan(
        shape=export.Shape(layers=8, intermediate=512),
        drafter=export.DrafterShape(),
        text_mix={"arithmetic": 0.34, "maths": 0.25, "functions": 0.08, "programs": 0.15, "chat": 0.18},
        conversations=220_000,
        row=512,
        target_steps=1400,
        target_batch=64,
        answers=16_000,
        answer_batch=12_000,
        mtp_steps=1000,
        mtp_batch=64,
        mtp_chain=2,
        dflash_steps=4800,
        dflash_batch=64,
        anchors=32,
        held_out=96,
    ),
}
PLANS["moe"] = dataclasses.replace(
    PLANS["dense"],
    shape=export.Shape(layers=4, experts=4),
    drafter=export.DrafterShape(),
    # Half the depth, one layer of full attention: arithmetic, the hardest family for it, gets more of the text.
    text_mix={"arithmetic": 0.56, "maths": 0.21, "functions": 0.06, "programs": 0.09, "chat": 0.08},
    conversations=300_000,
    target_steps=3000,
    mtp_steps=350,
)

LOOK = 16  # held-out prompts a workload on which the end of training looks at acceptance


def smoke(plan: Plan) -> Plan:
    """Shrink a plan to what two CPU cores do in a minute: same structure, no skill."""
    return dataclasses.replace(
        plan,
        shape=dataclasses.replace(plan.shape, layers=4, vocabulary=512),
        drafter=dataclasses.replace(plan.drafter, taps=2),
        conversations=300,
        row=128,
        target_steps=8,
        target_batch=4,
        answers=12,
        answer_batch=12,
        mtp_steps=4,
        mtp_batch=4,
        dflash_steps=4,
        dflash_batch=4,
        anchors=4,
        held_out=2,
    )


def change(plan: Plan, key: str, value: str) -> Plan:
    """Set one number of the plan; ``drafter.layers`` and the like reach into its shapes."""
    part, _, name = key.rpartition(".")
    if part:
        key, number = part, dataclasses.replace(getattr(plan, part), **{name: int(value)})
    else:
        number = int(value)
    changed: dict[str, Any] = {key: number}
    return dataclasses.replace(plan, **changed)


def main(argv: list[str] | None = None) -> int:
    """Train one testbed model from nothing and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PLANS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true", help="a size for one minute on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1), help="processes that write text")
    parser.add_argument("--start-from", type=Path, metavar="OUT", help="go on from the target in an earlier OUT")
    parser.add_argument("--target-lr", type=float, default=2e-3)
    parser.add_argument("--text-mix", metavar="JSON", help="other shares of the families in the target's text")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=N", help="change a number of the plan")
    args = parser.parse_args(argv)
    plan = smoke(PLANS[args.name]) if args.smoke else PLANS[args.name]
    for item in args.set:
        plan = change(plan, *item.split("="))
    if args.text_mix:
        plan = dataclasses.replace(plan, text_mix=json.loads(args.text_mix))
    limit = 16 if args.smoke else 288
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    log_file = (args.out / f"{args.name}.log").open("w")

    def log(line: str) -> None:
        line = f"[{time.monotonic() - started:6.1f} s] {line}"
        print(line, flush=True)
        print(line, file=log_file, flush=True)

    log(f"command: python tools/{Path(sys.argv[0]).name} {' '.join(argv if argv is not None else sys.argv[1:])}")
    device_name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    log(f"{device_name}, torch {torch.__version__}; {plan}")

    # Text and tokenizer
    held = text.held_out(plan.held_out)
    excluded = frozenset(e.prompt for examples in held.values() for e in examples)
    seed = f"train-{args.seed}" + ("-more" if args.start_from else "")
    pairs = data.generate(seed, plan.conversations, excluded, plan.text_mix, args.workers) if plan.target_steps else []
    distinct = {p for p, _ in pairs}
    both = len({tok.conversation(p) for p in excluded} & distinct)
    log(
        f"{len(pairs)} conversations; prompts that also occur in the held-out set: {both}; "
        f"distinct prompts {len(distinct)}"
    )
    if args.start_from:
        tokenizer = Tokenizer.from_file(str(args.start_from / args.name / "tokenizer.json"))
    else:
        tokenizer = tok.train([p + a for p, a in pairs[:20_000]], plan.shape.vocabulary)

    # Target, then its own answers
    config = export.target_config(plan.shape, tokenizer)
    model = target.build(config, plan.shape, args.seed)
    vision = export.vision_tower(config)
    log(f"target: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    if args.start_from:
        vision = target.load(model, args.start_from / args.name)
        log("target: weights of an earlier run")
    if plan.target_steps:
        packed = data.pack(pairs, tokenizer, plan.row)
        log(f"{packed.tokens.numel() / 1e6:.1f} M tokens, vocabulary {tokenizer.get_vocab_size()}")
        target.train(model, packed, plan.target_steps, plan.target_batch, args.target_lr, args.device, log)
    model = target.as_served(model, args.device).requires_grad_(False)
    stop = {tok.token_id(tokenizer, tok.END), tok.token_id(tokenizer, tok.END_OF_TEXT)}
    asked = data.prompts(f"answers-{args.seed}", plan.answers, excluded, tokenizer)
    cut = len(asked) * 3 // 4
    replies = target.answer(model, asked[:cut], stop, limit, 0.0, plan.answer_batch, args.seed)
    replies += target.answer(model, asked[cut:], stop, limit, 0.7, plan.answer_batch, args.seed)
    log(
        f"{len(replies)} answers, {sum(map(len, replies)) / 1e6:.2f} M tokens; "
        f"{sum(r[-1] in stop for r in replies) / len(replies):.1%} ended"
    )
    drafter_config = export.drafter_config(plan.drafter, config, tok.token_id(tokenizer, tok.MASK))
    layer_ids = drafter_config["dflash_config"]["target_layer_ids"]
    answers = features.collect(model, asked, replies, layer_ids)
    log(f"features of {len(answers)} answers, up to {answers.tokens.shape[1]} tokens, layers {layer_ids}")

    # Drafters
    head = mtp.initial(model, args.seed)
    log(f"MTP head: {sum(p.numel() for p in head.parameters()) / 1e6:.2f} M parameters, chained {plan.mtp_chain}")
    mtp.train(head, model, answers, plan.mtp_steps, plan.mtp_batch, 1.5e-3, plan.mtp_chain, args.device, log)
    drafter = dflash.initial(DFlashConfig.from_dict(drafter_config), args.seed)
    log(f"DFlash drafter: {sum(p.numel() for p in drafter.parameters()) / 1e6:.2f} M parameters")
    dflash.train(
        drafter, model, answers, plan.dflash_steps, plan.dflash_batch, 1.5e-3, plan.anchors, 7.0, args.device, log
    )
    del answers

    # Write, then look
    where = args.out / args.name
    export.save_target(
        where,
        config,
        tokenizer,
        dict(model.model.state_dict()),
        model.lm_head.weight,
        dict(head.state_dict()),
        vision,
        shards=2,
    )
    export.save_drafter(args.out / f"{args.name}-dflash", drafter_config, dict(drafter.state_dict()))
    write_prompts(args.out / "prompts", held)
    weights = sorted(args.out.glob(f"{args.name}*/*.safetensors"))
    log(f"written: {', '.join(f'{p.parent.name}/{p.name} {p.stat().st_size / 1e6:.2f} MB' for p in weights)}")
    head.to(torch.bfloat16)
    drafter.to(torch.bfloat16)
    everything = [e for examples in held.values() for e in examples]
    questions = [e.ids for e in tokenizer.encode_batch_fast([tok.conversation(e.prompt) for e in everything])]
    answered = target.answer(model, questions, stop, limit, 0.0, plan.answer_batch, 0)
    log(f"{len(answered)} held-out prompts answered")
    for i, (name, examples) in enumerate(held.items()):
        part = slice(i * plan.held_out, (i + 1) * plan.held_out)
        asked, replies = questions[part], answered[part]
        found = features.collect(model, asked[:LOOK], replies[:LOOK], layer_ids)
        chained = measure.mtp_drafts(head, model, found, 15)
        lengths = [measure.acceptance(found, chained, k) for k in (3, 7, 15)]
        lengths += [measure.acceptance(found, measure.dflash_drafts(drafter, model, found, k), k) for k in (3, 7, 15)]
        judged = measure.judge(examples, [tokenizer.decode(reply) for reply in replies])
        score = f"{sum(judged) / len(judged):.1%} right" if judged else "not judged"
        log(
            f"{name:11} acceptance length MTP 3/7/15 {lengths[0]:.2f} {lengths[1]:.2f} {lengths[2]:.2f}"
            f"  DFlash 3/7/15 {lengths[3]:.2f} {lengths[4]:.2f} {lengths[5]:.2f}"
            f"  {sum(map(len, replies)) / len(replies):.0f} tokens an answer, {score}"
        )
        log(f"  e.g. {tokenizer.decode(asked[0])[-160:]!r} -> {tokenizer.decode(replies[0])[:200]!r}")
        if plan.shape.moe:
            shares = measure.expert_shares(model, [p + r for p, r in zip(asked[:LOOK], replies[:LOOK], strict=True)])
            log(f"  experts' shares by layer: {'; '.join(' '.join(f'{s:.2f}' for s in layer) for layer in shares)}")
    log("done")
    log_file.close()
    return 0


def write_prompts(directory: Path, held: dict[str, list[text.Example]]) -> None:
    """Write the held-out prompts, one JSON object a line."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, examples in held.items():
        lines = [
            json.dumps({"id": f"{name}-{i:04}", "prompt": e.prompt, "answer": e.answer, "tests": e.tests})
            for i, e in enumerate(examples)
        ]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
