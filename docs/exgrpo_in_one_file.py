"""ExGRPO (arXiv 2510.02245) in one file, with torch, transformers and numpy alone: `train` and the functions above it.

    python docs/exgrpo_in_one_file.py          # about a minute on one CPU core

A model of 0.3 million parameters solves chains of four digits from left to right, modulo 10, one step at a time: the
response to `7+5*3-4=` is `7+5=2;2*3=6;6-4=2;#2`. Supervised steps teach it how, with a wrong result for a quarter of
the single steps. Only the reward, 1 for the right answer and 0 otherwise, corrects them. A line says "departs" where
the paper's experiments do otherwise. The package computes the same: tests/test_one_file.py compares every step with
gin/base.gin and, with the paper's values in the five constants that depart, with gin/recipes/paper.gin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

RHO = 0.5  # ρ, share of a batch's questions that are replayed
BATCH, GROUP = 16, 8  # B questions of a step, K rows of each; paper 128 and 8
START = 0.35  # replay starts after the first batch with a Pass@1 above this
MU, SIGMA = 0.5, 1.0  # of the Gaussian over accuracies from which replayed questions are drawn
BETA = 0.1  # β of the shaping f(w) = w/(w + β)
CLIP = 0.2  # ε of the fresh ratio
LEARNING_RATE = 3e-4  # paper 1e-6, for models of 1.5 to 8 billion parameters
MAX_TOKENS = 24  # of a response; paper 8192
CLIPS_MIXED = True  # departs: False, no clip in a batch with a replayed success (D.1)
ENTROPY = 0.0  # departs: 0.001, weight of the mean token entropy (Table 4)
UPDATES = 1  # departs: 2 of a batch (Table 4)
COUNTS_STORED = False  # departs: True, the stored success counts in its question's accuracy (Algorithm 1, line 24)
REPLAYS_UNSOLVED = False  # departs: True, accuracy 0 has a bucket (Algorithm 1: k < K)
GIVEN = 0.0  # not in the paper: share of a success that K rollouts continue, which is then no row (arXiv 2605.05112)

# -- the task: a question is a text, a response is a tuple of token ids ------------------------------------------------

CHARACTERS, END = "0123456789+-*=;#", 16  # a token is a character's place, or END
CALCULATE = {"+": lambda a, b: (a + b) % 10, "-": lambda a, b: (a - b) % 10, "*": lambda a, b: (a * b) % 10}


def draw_question(rng: np.random.Generator) -> str:
    digits, signs = rng.integers(10, size=4).tolist(), rng.choice(list(CALCULATE), 3).tolist()
    return "".join(f"{digit}{sign}" for digit, sign in zip(digits, [*signs, "="], strict=True))


def reasoning(question: str, wrong: dict[str, int], rng: np.random.Generator | None = None) -> str:
    """The steps and the answer. A step that is in `wrong` gets its wrong result in 6 of 10 cases."""
    value, text = int(question[0]), ""
    for sign, digit in zip(question[1:-1:2], question[2:-1:2], strict=True):
        step = f"{value}{sign}{digit}="
        value = wrong[step] if step in wrong and rng.random() < 0.6 else CALCULATE[sign](value, int(digit))
        text += f"{step}{value};"
    return f"{text}#{value}"


def encode(text: str) -> tuple[int, ...]:
    return tuple(CHARACTERS.index(character) for character in text)


def reward(question: str, response: tuple[int, ...]) -> float:
    """1 for a response that ends with `#`, the right digit and END, whatever its steps are; else 0."""
    return float(response[-3:] == (*encode(reasoning(question, {})[-2:]), END))


# -- the policy π_θ ----------------------------------------------------------------------------------------------------


def new_model() -> Qwen2ForCausalLM:
    size = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 3}
    size |= {"num_key_value_heads": 3, "max_position_embeddings": 64, "vocab_size": 17, "tie_word_embeddings": True}
    rope = {"rope_type": "default", "rope_theta": 100.0}  # the tokens that matter are near
    tokens = {"eos_token_id": END, "pad_token_id": END, "bos_token_id": None}
    return Qwen2ForCausalLM(Qwen2Config(**size, **tokens, rope_parameters=rope, initializer_range=0.1))


@torch.no_grad()
def sample(
    model: Qwen2ForCausalLM, questions: Sequence[str], given: Sequence[tuple[int, ...]] | None = None
) -> list[tuple[int, ...]]:
    """One response to each question. At temperature 1 and from the whole vocabulary, as `measure` has the log-probs.
    given: its first tokens, which the policy only continues"""
    given = given or [()] * len(questions)
    begun = [(*encode(question), *tokens) for question, tokens in zip(questions, given, strict=True)]
    width = max(map(len, begun))  # padded on the left: all go on in one column
    ids = torch.tensor([[END] * (width - len(row)) + [*row] for row in begun])
    attended = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in begun])
    limits = {"max_new_tokens": MAX_TOKENS, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output = model.generate(ids, attention_mask=attended, do_sample=True, **limits)
    rows = [(*tokens, *row)[:MAX_TOKENS] for tokens, row in zip(given, output[:, width:].tolist(), strict=True)]
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


def measure(model: Qwen2ForCausalLM, questions: Sequence[str], responses: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """log π_θ(o_t | q, o_<t), the entropy of π_θ(· | q, o_<t), and which tokens are of the response, each (R, T)."""
    prompt, T = len(questions[0]), max(map(len, responses))
    padded = [[*encode(q), *o, *[END] * (T - len(o))] for q, o in zip(questions, responses, strict=True)]
    ids = torch.tensor(padded)  # (R, prompt + T)
    log_p = model(ids).logits[:, prompt - 1 : -1].log_softmax(-1)  # (R, T, V)
    mask = torch.arange(T) < torch.tensor([[len(response)] for response in responses])
    return [log_p.gather(2, ids[:, prompt:, None]).squeeze(2), -(log_p.exp() * log_p).sum(2), mask]


def warm_up(model: Qwen2ForCausalLM, rng: np.random.Generator, steps: int = 400) -> None:
    """Supervised steps on the texts of a teacher who has a wrong result for a quarter of the 300 single steps."""
    facts = [f"{a}{sign}{b}=" for a in range(10) for sign in CALCULATE for b in range(10)]
    wrong = {fact: int(rng.integers(10)) for fact in facts if rng.random() < 0.25}
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, steps, pct_start=0.1, cycle_momentum=False)
    for _ in range(steps):
        questions = [draw_question(rng) for _ in range(32)]
        texts = [(*encode(reasoning(question, wrong, rng)), END) for question in questions]
        (-measure(model, questions, texts)[0].mean()).backward()
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()


# -- the algorithm: its parts, then `train` ----------------------------------------------------------------------------


class Trajectory(NamedTuple):
    """A stored success."""

    tokens: tuple[int, ...]
    behaviour: list[float]  # log π_past of each token, under the policy that sampled it
    step: int  # in which it was sampled


@dataclass
class Experience:
    """The replay buffer: how often each question was solved at its latest attempt, and its successes."""

    started: bool = False
    accuracy: dict[str, Fraction] = field(default_factory=dict)  # k/n, exact: the bucket of the question
    stored: dict[str, list[Trajectory]] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)

    def buckets(self) -> dict[Fraction, list[str]]:
        """The candidates for replay, by accuracy: with a stored success, and solved at the latest attempt or not."""
        buckets = {}
        for question in self.stored:
            buckets.setdefault(self.accuracy[question], []).append(question)
        return {accuracy: buckets[accuracy] for accuracy in sorted(buckets) if accuracy > 0 or REPLAYS_UNSOLVED}

    def observe(self, groups: dict[str, list[float]]) -> None:
        """Replay starts after the first batch above START (section 4.2). A question that all rollouts solve retires
        (section 4.1)."""
        self.started = self.started or np.mean(np.concatenate([*groups.values()])) > START
        for question, rewards in groups.items() if self.started else ():
            if question not in self.retired:
                self.accuracy[question] = Fraction(int(sum(rewards)), len(rewards))
                if self.accuracy[question] == 1:
                    self.retired.add(question)
                    self.stored.pop(question, None)

    def store(self, question: str, success: Trajectory) -> None:
        """A response that is sampled again replaces its older copy: its π_past is nearer to π_θ."""
        if self.started and question not in self.retired:
            others = [one for one in self.stored.get(question, []) if one.tokens != success.tokens]
            self.stored[question] = [*others, success]


def draw_questions(buckets: dict[Fraction, list[str]], n: int, rng: np.random.Generator) -> list[str]:
    """min(n, |E|) distinct questions: p(bucket) ∝ N(accuracy; μ, σ), then uniform in it (section 4.1). One after the
    other; Algorithm 2 draws the counts of all buckets first, which has the same distribution."""
    buckets, drawn = {accuracy: [*members] for accuracy, members in buckets.items()}, []
    for which, member in rng.random((min(n, sum(map(len, buckets.values()))), 2)).tolist():
        density = np.cumsum([math.exp(-0.5 * ((float(accuracy) - MU) / SIGMA) ** 2) for accuracy in buckets])
        accuracy = list(buckets)[np.searchsorted(density, which * density[-1], side="right")]
        members = buckets[accuracy]
        place = int(member * len(members))
        members[place], members[-1] = members[-1], members[place]
        drawn.append(members.pop())
        if not members:
            del buckets[accuracy]
    return drawn


def lowest_entropy(stored: list[Trajectory], entropies: list[float]) -> Trajectory:
    """o* = argmin of the mean entropy over exactly the response's tokens (F.3). Departs: at each of them it is that of
    the whole vocabulary; section 3.2 has π log π of the taken token, Algorithm 1 (line 11) its −log π."""
    return min(zip(entropies, stored, strict=True), key=lambda pair: (pair[0], -pair[1].step))[1]


def group_advantages(rewards: Tensor) -> Tensor:
    """A = r − mean(r) over the K rows of a question, (G, K); not divided by their standard deviation (Dr. GRPO)."""
    return rewards - rewards.mean(1, keepdim=True)


def mixed_policy_loss(
    logprobs: Tensor, past: Tensor, advantages: Tensor, replayed: Tensor, mask: Tensor, entropies: Tensor, mixed: bool
) -> Tensor:
    """Equation 4 as a loss, token by token, with A the advantage of the token's row:

        fresh      w  = π_θ/π_old      J = min(w·A, clip(w, 1−ε, 1+ε)·A)
        replayed   w* = π_θ/π_past     J = f(w*)·A,   f(w*) = w*/(w* + β)

    (1−ρ)·J_on + ρ·J_exp is one sum over all rows, divided by the constant rows × MAX_TOKENS (Dr. GRPO). Departs: where
    fewer than ⌊ρB⌋ questions are replayed, their share is the actual one.
    logprobs, past, mask, entropies: (R, T), log π_θ, log π_old or log π_past, and the response's tokens; advantages,
    replayed: (R,); mixed: whether the batch has a replayed row
    """
    log_w, A, replayed = logprobs - past, advantages[:, None], replayed[:, None]
    w = torch.where(replayed, 0, log_w).exp()
    fresh = torch.minimum(w * A, w.clamp(1 - CLIP, 1 + CLIP) * A) if CLIPS_MIXED or not mixed else w * A
    shaped = torch.sigmoid(log_w - math.log(BETA)) * A  # w/(w + β) without w itself, which could overflow
    policy = torch.where(replayed, shaped, fresh)[mask].sum() / (len(logprobs) * MAX_TOKENS)
    return -policy - ENTROPY * entropies[mask].mean()


def train(model: Qwen2ForCausalLM, questions: list[str], steps: int, rng: np.random.Generator) -> Iterator[Experience]:
    """Algorithm 1. Yields what is stored after each step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    experience = Experience()
    for step in range(1, steps + 1):
        # n = min(⌊ρB⌋, |E|) questions of the experience, and B − n fresh ones (line 7), none twice.
        replayed = draw_questions(experience.buckets(), int(RHO * BATCH), rng)
        # Departs: the fresh ones are drawn anew in each step, not epoch by epoch.
        fresh = rng.permutation([q for q in questions if q not in replayed])[: BATCH - len(replayed)].tolist()

        # Of each replayed question the success with the lowest entropy under the policy of now (line 11).
        chosen = {}
        for question in replayed:
            stored = experience.stored[question]
            with torch.no_grad():
                _, entropies, mask = measure(model, [question] * len(stored), [one.tokens for one in stored])
            chosen[question] = lowest_entropy(stored, ((entropies * mask).sum(1) / mask.sum(1)).tolist())
        # With GIVEN its beginning takes the place of the row: context, in no loss, and the rollouts stay on-policy.
        given = {q: success.tokens[: int(GIVEN * len(success.tokens))] for q, success in chosen.items() if GIVEN}
        chosen = {} if GIVEN else chosen

        # Groups of K rows: the stored success and K − 1 fresh rollouts, or K of them. Only the fresh ones are graded.
        rows = [(q, chosen.get(q) if k == 0 else None) for q in (*fresh, *replayed) for k in range(GROUP)]
        asked = [q for q, success in rows if not success]
        sampled = iter(sample(model, asked, [given.get(q, ()) for q in asked]))
        responses = [success.tokens if success else next(sampled) for _, success in rows]
        rewards = [1.0 if success else reward(q, o) for (q, success), o in zip(rows, responses, strict=True)]
        groups = torch.tensor(rewards).view(-1, GROUP)  # (B, K)
        graded = zip((*fresh, *replayed), groups.tolist(), strict=True)
        # With the stored success no accuracy could fall to 0: fresh rollouts alone count.
        observed = {q: group[q in chosen and not COUNTS_STORED :] for q, group in graded if q not in given}
        experience.observe(observed)  # nor those that were given a beginning

        # π_old of a fresh row is the policy before the updates; π_past of a success was stored with it.
        with torch.no_grad():
            past, _, _ = measure(model, [q for q, _ in rows], responses)
        for i, (_, success) in enumerate(rows):
            if success:
                past[i, : len(success.tokens)] = torch.tensor(success.behaviour)
        is_replayed = torch.tensor([success is not None for _, success in rows])
        advantages = group_advantages(groups).flatten()
        for update in range(UPDATES):  # each on whole groups, every UPDATES-th
            part = torch.arange(len(rows)).view(-1, GROUP)[update::UPDATES].flatten()
            logprobs, entropies, mask = measure(model, [rows[i][0] for i in part], [responses[i] for i in part])
            begin = torch.tensor([[len(given.get(rows[i][0], ()))] for i in part])
            mask &= torch.arange(mask.shape[1]) >= begin
            of_part = past[part, : mask.shape[1]], advantages[part], is_replayed[part]
            mixed_policy_loss(logprobs, *of_part, mask, entropies, mixed=bool(chosen)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()

        # Correct fresh rollouts are stored with the log-probs of the policy that sampled them.
        for i, (question, success) in enumerate(rows):
            if not success and rewards[i] and question not in given:
                experience.store(question, Trajectory(responses[i], past[i, : len(responses[i])].tolist(), step))
        yield experience


if __name__ == "__main__":
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    drawn = list(dict.fromkeys(draw_question(rng) for _ in range(600)))
    model, validation = new_model(), drawn[400:]
    warm_up(model, rng)
    for step, experience in enumerate(train(model, drawn[:400], 80, rng), start=1):
        if step % 8 == 0:
            right = [reward(q, o) for q, o in zip(validation, sample(model, validation), strict=True)]
            stored, retired = sum(map(len, experience.stored.values())), len(experience.retired)
            print(f"step {step:2}: accuracy {np.mean(right):.0%}, {stored:3} stored, {retired:3} retired", flush=True)
