"""Training steps per second of the local engine against TRL's GRPOTrainer, on the same work in one run.

Goal: at least 1.2 times TRL's steps per second where all responses have one length, at least 1.5 times where lengths
vary; the same loss and gradient on identical rollouts.

The work: modular chains, 32 questions × 8 rollouts a step, gin/toy.gin's warmed-up model, on-policy Dr. GRPO, one
optimiser step. Both see the same questions in the same order at the same learning rate, temperature 1, no filters, no
KL, float32. 'fixed': 5 operands, and the limit is the length of a right response; 'varied': 3 to 7 operands and a limit
of 64 tokens: right responses have 15 to 39, and now and then one that lost its way is longer. One step of each in turn,
with one thread; the figure is the median over the pairs of TRL's seconds by ours, which other work on the machine
disturbs little. TRL runs without reports, checkpoints, logs and gradient checkpointing, in micro-batches of 64 rows:
of 256, 128, 64 and 32 rows, none is faster for it by more than the noise. Its steps include its data loader, ours the
grading; what our training loop adds to a step besides (metrics and their file) takes 3 ms.

Takes about a minute, and four more where the model has not been warmed up before.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import TINY, finish, make_parser
from datasets import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.local import LocalParts, TorchEngine
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.experiment import Experiment
from exgrpo_orlhf.objective import TokenBatch
from exgrpo_orlhf.questions.prompts import PromptEncoder
from exgrpo_orlhf.records import MixedBatch
from exgrpo_orlhf.replay import Plan

B, K = 32, 8
TRL_ROWS = 64  # in one forward and backward pass
UNTIMED = 2  # steps of each at the start
# operands, most tokens of a response, times TRL's steps per second
WORK = {"fixed": ((5,), 27, 1.2), "varied": ((3, 4, 5, 6, 7), 64, 1.5)}
SAME = 1e-5  # largest relative difference


class Ours:
    """The local engine's step, call by call as in training.py."""

    def __init__(self, experiment: Experiment, model_path: Path) -> None:
        self.experiment = experiment
        self.engine = TorchEngine(LocalParts.of(experiment), model_path=model_path)
        self.questions = experiment.questions.load()
        self.steps = self.tokens = 0

    def rollouts(self) -> MixedBatch:
        first = self.steps * B % len(self.questions)
        self.steps += 1
        plan = Plan(self.steps, self.questions[first : first + B], [], {})
        graded = self.experiment.verifier.grade_groups(self.engine.rollout(plan, K), self.engine.written)
        groups = plan.in_order(graded)
        mixer = self.experiment.mixer
        return mixer.assemble(mixer.complete(groups, {}), self.experiment.advantages)

    def step(self) -> None:
        batch = self.rollouts()
        self.engine.update(batch, self.experiment.loss)
        self.tokens += sum(len(row.token_ids) for row in batch.flat_rows())


class InTurn(TrainerCallback):
    """Times TRL's steps from end to end, and after each of them one of ours."""

    def __init__(self, ours: Callable[[], None]) -> None:
        self.ours = ours
        self.seconds: list[tuple[float, float]] = []  # TRL's, ours
        self.resumed = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        ended = time.perf_counter()
        self.ours()
        done = time.perf_counter()
        self.seconds.append((ended - self.resumed, done - ended))
        self.resumed = time.perf_counter()


def trl_trainer(
    experiment: Experiment, tokenizer: Any, model_path: Path, rows: int, counted: list[int], **arguments: Any
) -> GRPOTrainer:
    """rows: in one forward and backward pass; counted: gets the tokens of every response; arguments: of GRPOConfig"""
    encoder = PromptEncoder(experiment.prompts, tokenizer)
    questions = {tokenizer.decode(encoder.encode(question)): question for question in experiment.questions.load()}
    b, k = experiment.settings.questions_per_step, experiment.settings.group_size

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        counted.extend(map(len, completion_ids))
        pairs = [(questions[prompt], text) for prompt, text in zip(prompts, completions, strict=True)]
        return [float(grade.reward or 0.0) for grade in experiment.verifier.grade_all(pairs)]

    loss, optimizer, sampling = experiment.loss, experiment.optimizer, experiment.sampling
    same: dict[str, Any] = {"num_iterations": 1, "loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0}
    same |= {"epsilon": loss.clip_low, "epsilon_high": loss.clip_high, "max_grad_norm": optimizer.max_grad_norm}
    same |= {"learning_rate": optimizer.learning_rate, "lr_scheduler_type": optimizer.schedule}
    same |= {"weight_decay": optimizer.weight_decay, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    same |= {"max_completion_length": sampling.max_response_tokens, "num_generations": k, "shuffle_dataset": False}
    same |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": b * k // rows}
    lean = {"gradient_checkpointing": False, "dataloader_pin_memory": False, "report_to": "none", "disable_tqdm": True}
    lean |= {"save_strategy": "no", "logging_strategy": "no"}
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa"),
        reward_funcs=reward,
        args=GRPOConfig(**same, **lean, **arguments),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in questions]),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def largest_difference(ours: Ours, trainer: GRPOTrainer) -> float:
    """Between both losses and between their gradients, relative to TRL's, on our rollouts of one step.

    The behaviour log-probs are the policy's with noise: at a ratio of 1 the loss would not depend on any log-prob.
    """
    engine, loss = ours.engine, ours.experiment.loss
    rows = ours.rollouts().flat_rows()
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    forward = [ForwardRow(engine.prompts.encode(row.question), row.token_ids) for row in rows]
    logprobs, entropies = engine.forward(forward)  # (T,), (T,)
    noise = torch.empty_like(logprobs).normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    behaviour = logprobs.detach() + noise
    advantages = torch.tensor([row.advantage for row in rows])
    batch = TokenBatch(
        logprobs=logprobs,
        entropies=entropies,
        behaviour_logprobs=behaviour,
        advantages=advantages.repeat_interleave(lengths),
        replayed=torch.zeros(len(logprobs), dtype=torch.bool),
        in_loss=torch.ones(len(logprobs), dtype=torch.bool),
        row_weights=loss.row_weights(lengths).float().repeat_interleave(lengths),
        token_weight=1 / len(logprobs),
        row_of=torch.arange(len(rows)).repeat_interleave(lengths),
        mixed=False,
    )
    value = loss(batch)
    value.backward()

    def padded(values: list[Any], side: str = "right") -> torch.Tensor:
        tensors = [torch.as_tensor(value) for value in values]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side)

    model = trainer.model.eval()
    trl_value = trainer._compute_loss(
        model,
        {
            "prompt_ids": padded([row.prompt for row in forward], "left"),
            "prompt_mask": padded([[1] * len(row.prompt) for row in forward], "left"),
            "completion_ids": padded([row.token_ids.astype(np.int64) for row in forward]),
            "completion_mask": padded([[1] * len(row.token_ids) for row in forward]),
            "advantages": advantages,
            "old_per_token_logps": padded(behaviour.split(lengths.tolist())),
        },
    )
    trl_value.backward()
    mine, theirs = (
        torch.cat([parameter.grad.flatten() for parameter in used.parameters()]) for used in (engine.model, model)
    )
    for used in (engine.model, model):
        used.zero_grad()
    loss_differs = abs(value.item() / trl_value.item() - 1)
    return max(loss_differs, float((mine - theirs).norm() / theirs.norm()))


def compare(name: str, steps: int, small: bool) -> dict[str, float]:
    operands, tokens, goal = WORK[name]
    bindings = [f"ModularChains.operands = {operands}", f"MAX_RESPONSE_TOKENS = {tokens}", *(TINY if small else [])]
    bindings += ["LocalEngine.device = 'cpu'", "LocalEngine.micro_batch_tokens = 2048"]
    experiment = config.load(["baselines/on_policy.gin"], bindings)
    model_path = experiment.model.prepare()
    ours = Ours(experiment, model_path)
    with tempfile.TemporaryDirectory() as folder:
        counted: list[int] = []
        length = {"output_dir": folder, "max_steps": UNTIMED + steps, "use_cpu": True, "bf16": False}
        trainer = trl_trainer(experiment, ours.engine.tokenizer, model_path, TRL_ROWS, counted, **length)
        difference = largest_difference(ours, trainer)
        ours.steps = 0
        turns = InTurn(ours.step)
        trainer.add_callback(turns)
        trainer.train()
    timed = turns.seconds[UNTIMED:]
    return {
        "trl_seconds": statistics.median(theirs for theirs, _ in timed),
        "our_seconds": statistics.median(mine for _, mine in timed),
        "speed_ratio": statistics.median(theirs / mine for theirs, mine in timed),
        "goal": goal,
        "our_tokens_per_response": ours.tokens / (ours.steps * B * K),
        "trl_tokens_per_response": sum(counted) / len(counted),
        "largest_difference": difference,
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each, for each kind of work")
    arguments = parser.parse_args()
    steps = 1 if arguments.small else arguments.steps
    logging.disable_progress_bar()

    print(f"{B} questions × {K} rollouts a step, 1 thread, medians of {steps} steps")
    print(
        f"{'responses':12}{'s/step TRL':>12}{'s/step ours':>13}{'times':>8}{'goal':>6}{'loss differs by':>18}"
        f"{'tokens TRL, ours':>19}"
    )
    figures = {}
    for name in WORK:
        row = figures[name] = compare(name, steps, arguments.small)
        print(
            f"{name:12}{row['trl_seconds']:12.3f}{row['our_seconds']:13.3f}{row['speed_ratio']:8.2f}{row['goal']:6.1f}"
            f"{row['largest_difference']:18.1e}"
            f"{row['trl_tokens_per_response']:12.1f}{row['our_tokens_per_response']:7.1f}",
            flush=True,
        )
    fast = arguments.small or all(row["speed_ratio"] >= row["goal"] for row in figures.values())
    met = fast and all(row["largest_difference"] <= SAME for row in figures.values())
    summary = ", ".join(f"{name} {row['speed_ratio']:.2f} (goal {row['goal']})" for name, row in figures.items())
    return finish(arguments, {"steps": steps, "work": figures, "met": met}, f"times TRL's steps per second: {summary}")


if __name__ == "__main__":
    sys.exit(main())
