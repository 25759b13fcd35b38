"""docs/exgrpo_in_one_file.py against the package with the settings of base.gin and of recipes/paper.gin: the same
choices of questions and trajectories from the same draws, the same advantages, losses, gradients and stored experience,
in every step."""

from __future__ import annotations

import ast
import importlib.util
import sys

import numpy as np
import pytest
import torch
from replay_builders import rollout
from run_builders import ROOT

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.local.forward import PolicyForward
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.objective import TokenBatch
from exgrpo_orlhf.records import Question, RolloutGroup, Trajectory
from exgrpo_orlhf.replay.sampling import IndexedSet

B, K, STEPS = 6, 4, 8
EASY_FROM = 3  # step in which Pass@1 rises above the start of replay
# What the file has of base.gin and of recipes/paper.gin. All settings by which these differ are here.
PAPER = {
    "CLIPS_MIXED": "MixedPolicyLoss.clips_mixed",
    "ENTROPY": "MixedPolicyLoss.entropy_coef",
    "UPDATES": "Optimizer.steps_per_batch",
    "COUNTS_STORED": "ReplayBuffer.counts_stored",
    "REPLAYS_UNSOLVED": "ReplayBuffer.replays_unsolved",
}


@pytest.fixture
def one_file(monkeypatch):
    spec = importlib.util.spec_from_file_location("exgrpo_in_one_file", ROOT / "docs" / "exgrpo_in_one_file.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BATCH", B)
    monkeypatch.setattr(module, "GROUP", K)
    return module


class Package:
    """The package's objects, fed with what the one file samples."""

    def __init__(self, module, model, recipe) -> None:
        sizes = [f"train.questions_per_step = {B}", f"train.group_size = {K}"]
        self.experiment = config.load([recipe], [*sizes, f"MAX_RESPONSE_TOKENS = {module.MAX_TOKENS}"])
        self.module, self.buffer, self.step = module, self.experiment.buffer, 1
        self.forward = PolicyForward(model, 1.0, torch.float32)
        self.replayed: list[str] = []  # question texts of the step, in order

    def question(self, text: str) -> Question:
        return Question.make("chains", text, "0")

    def check_draw(self, buckets, n, rng, draw):
        ids = {self.question(text).id: text for members in buckets.values() for text in members}
        by_id = {accuracy: [self.question(text).id for text in members] for accuracy, members in buckets.items()}
        candidates = {accuracy: set(members) for accuracy, members in self.buffer.candidates.items()}
        assert {accuracy: set(members) for accuracy, members in by_id.items()} == candidates
        same = np.random.default_rng()
        same.bit_generator.state = rng.bit_generator.state
        self.replayed = draw(buckets, n, rng)
        assert len(self.replayed) == min(int(self.experiment.mixer.share.at(self.step) * B), self.buffer.n_candidates)
        sets = {accuracy: IndexedSet(members) for accuracy, members in by_id.items()}
        mixer = self.experiment.mixer
        drawn = mixer.sampler.sample(sets, len(self.replayed), K, mixer.buckets, same)
        assert [ids[question_id] for question_id in drawn] == self.replayed
        self.unchosen = list(self.replayed)
        return list(self.replayed)

    def check_choice(self, stored, entropies, choose):
        text = self.unchosen.pop(0)
        question = self.question(text)
        candidates = self.buffer.trajectories(question.id)
        assert [tuple(one.token_ids.tolist()) for one in candidates] == [one.tokens for one in stored]
        rows = [ForwardRow(self.module.encode(text), one.token_ids) for one in candidates]
        measured = self.forward.measure(rows, 2048)
        assert [one.entropy for one in measured] == pytest.approx(entropies, abs=1e-5)
        measured = [one._replace(entropy=entropy) for one, entropy in zip(measured, entropies, strict=True)]
        chosen = self.experiment.selector.choose({question: candidates}, {question: measured}, np.random.default_rng())
        success = choose(stored, entropies)
        assert tuple(chosen[question.id].trajectory.token_ids.tolist()) == success.tokens
        return success

    def observe(self, rewards):
        assert {text: len(group) for text, group in rewards.items()} == {
            text: K - 1 if text in self.replayed and not self.module.COUNTS_STORED else K for text in rewards
        }
        rewards = {text: group[1 - K :] if text in self.replayed else group for text, group in rewards.items()}
        verdicts = {text: ["correct" if one else "wrong" for one in group] for text, group in rewards.items()}
        groups = [
            RolloutGroup(self.question(text), tuple(map(rollout, own)), text in self.replayed)
            for text, own in verdicts.items()
        ]
        self.experiment.mixer.share.observe(groups, self.step)
        if self.experiment.mixer.collecting:
            self.buffer.observe(groups, self.step)

    def store(self, text, success):
        ids, behaviour = np.array(success.tokens, np.int32), np.array(success.behaviour, np.float32)
        if self.experiment.mixer.collecting:
            self.buffer.store([(self.question(text).id, Trajectory(ids, behaviour, 1.0, success.step))])

    def check_stored(self, experience):
        theirs = {text: [(one.tokens, one.step) for one in own] for text, own in experience.stored.items()}
        ours = {question_id: [one.trajectory for one in own.stored] for question_id, own in self.buffer.records.items()}
        assert {self.question(text).id: successes for text, successes in theirs.items()} == {
            question_id: [(tuple(one.token_ids.tolist()), one.step) for one in own]
            for question_id, own in ours.items()
            if own
        }

    def loss(self, logprobs, past, advantages, replayed, mask, entropies):
        lengths = mask.sum(1)
        spread = lambda values: values.repeat_interleave(lengths)
        rows = torch.arange(len(mask))
        return self.experiment.loss(
            TokenBatch(
                logprobs=logprobs[mask],
                entropies=entropies[mask],
                behaviour_logprobs=past[mask],
                advantages=spread(advantages),
                replayed=spread(replayed),
                in_loss=torch.ones(int(lengths.sum()), dtype=torch.bool),
                row_weights=spread(self.experiment.loss.row_weights(lengths).float()),
                token_weight=1 / int(lengths.sum()),
                row_of=spread(rows),
                mixed=bool(self.replayed),
            )
        )


@pytest.mark.parametrize(
    ("recipe", "seed"), [("base.gin", 0), ("base.gin", 1), *(("recipes/paper.gin", i) for i in range(3))]
)
def test_the_one_file_is_the_package_in_every_step(recipe, seed, one_file, monkeypatch):
    params, base = (config.load([file]).params for file in (recipe, "base.gin"))
    assert {name for name in params if params[name] != base[name]} == (set(PAPER.values()) if params != base else set())
    for constant, binding in PAPER.items():
        assert repr(getattr(one_file, constant)) == base[binding]
        monkeypatch.setattr(one_file, constant, ast.literal_eval(params[binding]))
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = one_file.new_model()
    package = Package(one_file, model, recipe)
    noise = torch.Generator().manual_seed(seed)

    def reward(question, response):
        """Half of the finished responses of a hard question, all of an easy one; at first hardly any."""
        right = response[0] % 2 or int(question[0]) < 5
        return float(one_file.END in response and right and (package.step >= EASY_FROM or response[0] == 5))

    def loss(logprobs, past, *of_rows, mixed):
        assert mixed == bool(package.replayed)
        moved = logprobs.detach() + 0.3 * torch.randn(logprobs.shape, generator=noise)  # π_θ is no longer π_old
        for values in (logprobs.detach(), moved):
            inputs = [values.clone().requires_grad_() for _ in range(2)]
            ours, packages = real_loss(inputs[0], past, *of_rows, mixed), package.loss(inputs[1], past, *of_rows)
            gradients = [torch.autograd.grad(*pair)[0] for pair in zip((ours, packages), inputs, strict=True)]
            torch.testing.assert_close(ours, packages, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-9)
            assert gradients[0].any() == of_rows[0].any()  # a gradient where an advantage is
        return real_loss(logprobs, past, *of_rows, mixed)

    def advantages(rewards):
        values = real_advantages(rewards)
        expected = package.experiment.advantages(rewards.numpy().astype(np.float64), np.ones(rewards.shape, bool))
        torch.testing.assert_close(values.double(), expected, rtol=0, atol=1e-7)
        return values

    def observe(experience, rewards):
        package.observe(rewards)
        real_observe(experience, rewards)

    def store(experience, question, success):
        package.store(question, success)
        real_store(experience, question, success)

    real_loss, real_advantages = one_file.mixed_policy_loss, one_file.group_advantages
    real_draw, real_choice = one_file.draw_questions, one_file.lowest_entropy
    real_observe, real_store = one_file.Experience.observe, one_file.Experience.store
    monkeypatch.setattr(one_file, "reward", reward)
    monkeypatch.setattr(one_file, "mixed_policy_loss", loss)
    monkeypatch.setattr(one_file, "group_advantages", advantages)
    monkeypatch.setattr(one_file, "draw_questions", lambda *draw: package.check_draw(*draw, real_draw))
    monkeypatch.setattr(one_file, "lowest_entropy", lambda *choice: package.check_choice(*choice, real_choice))
    monkeypatch.setattr(one_file.Experience, "observe", observe)
    monkeypatch.setattr(one_file.Experience, "store", store)
    questions = list(dict.fromkeys(one_file.draw_question(rng) for _ in range(12)))
    choices = 0
    for experience in one_file.train(model, questions, STEPS, rng):
        assert experience.started == package.experiment.mixer.share.started == (package.step >= EASY_FROM)
        assert {package.question(text).id for text in experience.retired} == set(package.buffer.retired)
        package.check_stored(experience)
        choices += sum(len(successes) > 1 for successes in experience.stored.values())
        package.step += 1
    assert experience.retired
    assert choices
    assert package.replayed
    text, successes = max(experience.stored.items(), key=lambda pair: len(pair[1]))
    experience.store(text, successes[0]._replace(step=package.step))  # as if it had been sampled again
    package.check_stored(experience)


def test_continued_groups_of_the_one_file_are_the_packages(one_file, monkeypatch):
    """The given tokens begin all K rollouts, are in no loss and count for nothing; the loss is the on-policy one."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model, real_loss, continued = one_file.new_model(), one_file.mixed_policy_loss, 0
    monkeypatch.setattr(one_file, "GIVEN", 0.5)
    monkeypatch.setattr(one_file, "REPLAYS_UNSOLVED", True)
    monkeypatch.setattr(one_file, "START", -1.0)
    monkeypatch.setattr(
        one_file, "reward", lambda question, response: float(response[0] % 2 and one_file.END in response)
    )
    package, masks = Package(one_file, model, "base.gin"), []

    def loss(logprobs, past, advantages, replayed, mask, entropies, mixed):
        assert not mixed
        assert not replayed.any()
        masks.append(mask)
        ours = real_loss(logprobs, past, advantages, replayed, mask, entropies, mixed)
        theirs = package.loss(logprobs, past, advantages, replayed, mask, entropies)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        return ours

    def sample(model, questions, given, real=one_file.sample):
        responses = real(model, questions, given)
        assert all(row[: len(tokens)] == tokens for row, tokens in zip(responses, given, strict=True))
        asked.append((questions, given))
        return responses

    asked = []
    monkeypatch.setattr(one_file, "mixed_policy_loss", loss)
    monkeypatch.setattr(one_file, "sample", sample)
    questions = list(dict.fromkeys(one_file.draw_question(rng) for _ in range(8)))
    before = {}
    for experience in one_file.train(model, questions, 6, rng):
        (texts, given), mask = asked[-1], masks[-1]
        assert mask.shape[0] == len(texts) == B * K
        for row, tokens in zip(mask, given, strict=True):
            assert not row[: len(tokens)].any()
            assert row[len(tokens)]
        begun = {text for text, tokens in zip(texts, given, strict=True) if tokens}
        assert all(experience.accuracy[text] == before[text] for text in begun)
        before, continued = dict(experience.accuracy), continued + len(begun)
    assert continued > 3


def test_the_one_file_is_short_and_stands_alone(one_file):
    text = (ROOT / "docs" / "exgrpo_in_one_file.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 285
    assert "exgrpo_orlhf" not in text
    assert one_file.RHO == 0.5
