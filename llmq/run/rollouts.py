"""The training data of `llmq rl`: the model's own samples, and advantages from the samples'
rewards.

A rollout consists of a group of samples for each of a few prompts, made by the present weights. The
rollout's prompts and seeds depend only on the number of the rollout. One or several optimizer steps
train all samples of a rollout. A Trainer takes batches from `Rollouts` in place of token files.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llmq.base.batch import Batch
from llmq.base.errors import ConfigError, DataError, warn
from llmq.base.files import disk_errors
from llmq.data.tokens import MASKED_TARGET
from llmq.model.generator import Completion
from llmq.options.loss_params import POLICIES
from llmq.run.episodes import Episodes
from llmq.run.metrics import Reporter
from llmq.run.ranks import Rank
from llmq.run.rewards import REWARD, Function, Group, RewardError, Rewards, Scores
from llmq.run.run_paths import samples_path
from llmq.run.sampling import Conversation, conversation, known_tokenizer, prompt_ids
from llmq.run.teacher import Teacher
from llmq.state.rules import FIRST

if TYPE_CHECKING:
    from llmq.run.trainer import Trainer

LEAST_STD = 1e-4  # number added to the standard deviation of a group's rewards


class Sample(NamedTuple):
    """A completion of a prompt. prompt: number of the prompt. ids: new tokens, including the token
    that ended the text. logprobs: log-probability of each token when it was sampled; None for
    tokens of an environment, which are not trained. advantage: the completion's advantage in its
    group."""

    prompt: int
    ids: list[int]
    logprobs: list[float | None]
    advantage: float


class Drawn(NamedTuple):
    """The samples of a prompt. number: number of the prompt. group: texts of the samples. made: the
    samples as completions. scores: components of each sample's reward, or the error of the rewards
    in words."""

    number: int
    group: Group
    made: list[Completion]
    scores: Scores | str

    @property
    def problem(self) -> str:
        """Return the error of the rewards; "" if there is none."""
        return self.scores if isinstance(self.scores, str) else ""

    @property
    def rewards(self) -> np.ndarray:
        """Return the rewards of all samples, F64 (n,)."""
        return np.array([one[REWARD] for one in self.scores])

    @property
    def equal(self) -> bool:
        """Return True if all rewards are equal, which makes all advantages 0."""
        return bool(np.ptp(self.rewards) == 0)


def advantages(rewards: np.ndarray, *, scale: bool) -> np.ndarray:
    """Return advantages F64 (n,) of a group's samples: rewards F64 (n,) less their mean. With
    `scale`, advantages are divided by the rewards' standard deviation (divisor n - 1) plus
    LEAST_STD."""
    apart = rewards - rewards.mean()
    return apart / (rewards.std(ddof=1) + LEAST_STD) if scale else apart


def packed(
    samples: Sequence[Sample], prompts: Sequence[list[int]], shape: tuple[int, int], ranks: int
) -> list[Batch]:
    """Pack samples with their prompts into micro-batches of shape (B, T): B sequences of T tokens.
    The number of micro-batches is the least multiple of `ranks` that holds all samples. The longest
    sample is packed first; each sample goes into the first sequence with room."""
    B, T = shape
    rows: list[list[int]] = []  # numbers of samples
    room: list[int] = []
    lengths = [len(prompts[s.prompt]) + len(s.ids) - 1 for s in samples]
    for number in sorted(range(len(samples)), key=lambda i: -lengths[i]):
        at = next((i for i, left in enumerate(room) if left >= lengths[number]), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(T)
        rows[at].append(number)
        room[at] -= lengths[number]
    count = max(-(-len(rows) // (B * ranks)), 1) * ranks
    rows += [[] for _ in range(B * count - len(rows))]
    numbered = [rows[first::count] for first in range(count)]  # spreads the fullest rows
    return [
        _batch([[(samples[i], prompts[samples[i].prompt]) for i in row] for row in part], T)
        for part in numbered
    ]


def _batch(rows: Sequence[Sequence[tuple[Sample, list[int]]]], T: int) -> Batch:
    """Return the micro-batch of `rows`. A row has samples, each with the ids of its prompt."""
    shape, at = (len(rows), T), np.arange(T, dtype=np.int32)
    inputs, targets = np.zeros(shape, np.int32), np.full(shape, MASKED_TARGET, np.int32)
    starts, lengths = np.tile(at, (shape[0], 1)), np.zeros(shape[0], np.int32)
    named = {name: np.zeros(shape, np.float32) for name in ("advantages", "sampled")}
    for row, of_row in enumerate(rows):
        first = 0
        for sample, prompt in of_row:
            ids = [*prompt, *sample.ids]
            end, new = first + len(ids) - 1, first + len(prompt) - 1
            inputs[row, first:end], starts[row, first:end] = ids[:-1], first
            trained = [each is not None for each in sample.logprobs]
            targets[row, new:end] = np.where(trained, sample.ids, MASKED_TARGET)
            named["sampled"][row, new:end] = [each or 0.0 for each in sample.logprobs]
            named["advantages"][row, new:end] = sample.advantage
            first = end
        lengths[row] = first
    padding = int(shape[0] * T - lengths.sum())
    return Batch(inputs, targets, starts, padding, named, lengths)


class Rollouts:
    """Makes samples, the training data of a Trainer in place of token files.

    last: numbers of the newest rollout by name. reward: mean over samples; reward_std: mean
    standard deviation within groups; reward/NAME: mean of a component; length: mean tokens of a
    sample; cut: fraction of samples that max_new_tokens has cut; drawn: number of groups, including
    replaced groups; equal: fraction of drawn groups with equal rewards; failed: number of groups
    without rewards; sample_ms, reward_ms: durations. seed: --train-seed, for the order of prompts
    and for samples. reporter: receives the numbers of `last`; None: no reports, and no file of
    samples beside the log.
    """

    def __init__(
        self,
        trainer: "Trainer",
        records: Sequence[Mapping[str, Any]],
        reward: Rewards | Function | None = None,
        places: Sequence[str] = (),
    ):
        """trainer: its config has the options of the group `rl`. records: each has `prompt` (a text
        or chat messages) and fields for the reward. reward: function of a group's texts and its
        record; None: only --teacher trains. places: name of each record in error messages. Raises
        LlmqError for contradicting options, a malformed prompt, a prompt too long for --seq-len,
        and an unsuitable teacher."""
        self._trainer, self._config = trainer, (config := trainer.config)
        known = reward is None or isinstance(reward, Rewards)
        self._reward = reward if known else Rewards(reward)
        self._places = places or [f"prompt {number}" for number in range(len(records))]
        self._check(records)
        scale = config.scale_rewards
        self._scale = config.loss != "dr-grpo" if scale is None else scale
        self._records = [dict(record) for record in records]
        self._tokenizer, self._stop = known_tokenizer(trainer.tokenizer), set()
        self._talk: Conversation | None = None
        self._prompts = [*self._encoded()]
        self._episodes: Episodes | None = None
        if self._reward is not None and self._reward.has_turns:
            how = {"turns": config.max_turns, "positions": config.seq_len}
            self._episodes = Episodes(self._reward, self._tokenizer, self._talk, **how)
        content = json.dumps([self._prompts, config.prompts_per_step, config.updates])
        self._digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        self.seed = config.train_seed
        self._update, self._taken = 0, 0  # number of the next update; its batches handed out so far
        self._sampled: int | None = None  # number of the rollout to which _samples belong
        self._samples: list[Sample] = []
        self._batches: list[Batch] = []
        self.last: dict[str, float] = {}
        self._times = {"sample_ms": 0.0, "reward_ms": 0.0}  # durations of the newest rollout
        self.reporter: Reporter | None = None
        self._teacher = None if config.teacher is None else Teacher(trainer)
        trainer.samples, trainer.train_loaders = self, [self] * self._ranks

    def _check(self, records: Sequence[Mapping[str, Any]]) -> None:
        config, trainer = self._config, self._trainer
        if trainer.world.several:
            raise ConfigError("llmq rl: runs in one process, with all GPUs of one machine")
        if config.teacher is None and config.loss not in POLICIES:
            raise ConfigError(
                f"--loss {config.loss}: does not learn from samples: give --loss dapo"
            )
        if config.has_reference and not config.keep_reference:
            raise ConfigError(
                "--loss-params: beta compares with the first weights: give --keep-reference"
            )
        if not config.document_mask:
            raise ConfigError("--no-document-mask: several samples share a sequence: leave it out")
        if not records:
            raise DataError("there are no prompts to sample from")
        if config.teacher is None and self._reward is None:
            raise ConfigError("there is neither a reward function nor a --teacher")
        if config.num_samples < 2 and self._reward is not None:
            raise ConfigError("--num-samples: an advantage compares samples: give 2 or more")
        rows = config.prompts_per_step * config.num_samples
        capacity = config.batch_size * trainer.micro_batches
        if rows > capacity:
            raise ConfigError(
                f"--grad-accumulation: {rows} samples of a step may fill as many sequences, and "
                f"{capacity} fit: raise it by {-(-rows // capacity)} times"
            )

    # -- prompts ---------------------------------------------------------------------------------

    def _encoded(self) -> Iterator[list[int]]:
        """Yield the ids of each prompt."""
        tools = None if self._reward is None else self._reward.tools
        if self._tokenizer.eos_id is not None:
            self._stop.add(self._tokenizer.eos_id)
        for record, where in zip(self._records, self._places, strict=True):
            prompt = record.get("prompt")
            if isinstance(prompt, str):
                ids = prompt_ids(self._tokenizer, self._trainer.model, prompt, flag=where)
            elif isinstance(prompt, list) and prompt:
                self._talk = self._talk or self._chat(where)
                ids = self._talk.prompt(prompt, tools)
            else:
                raise DataError(f"{where}: 'prompt' must be a text or a list of messages")
            longest = len(ids) + self._config.max_new_tokens
            if longest > self._trainer.config.seq_len:
                raise DataError(
                    f"{where}: the prompt has {len(ids)} tokens, and with --max-new-tokens "
                    f"{self._config.max_new_tokens} more it does not fit into --seq-len "
                    f"{self._trainer.config.seq_len}: leave it out, or raise --seq-len"
                )
            yield ids

    def _chat(self, where: str) -> Conversation:
        """Return the chat whose template renders messages as prompts; the end of a turn ends a
        sample. where: name of the record in errors."""
        talk = conversation(self._tokenizer, self._config.chat_template)
        if talk is None:
            raise ConfigError(
                f"{where}: 'prompt' is a list of messages, and the tokenizer has no chat template: "
                "give --chat-template FILE"
            )
        if talk.stop.text is not None:
            raise ConfigError(
                f"--chat-template: ends a turn with the text {talk.stop.text!r}, which is no "
                "token, so that samples would not end: give prompts as texts, or another template"
            )
        self._stop |= {*talk.stop.ids}
        return talk

    def _chosen(self, rollout: int) -> list[int]:
        """Return the numbers of a rollout's prompts. Each pass over all prompts has its own order;
        the pass's last rollout is filled up with the first prompts of that order."""
        per_pass, count = self._rollouts_per_pass, self._config.prompts_per_step
        which, place = divmod(rollout, per_pass)
        order = np.random.default_rng([self.seed, which]).permutation(len(self._prompts))
        return np.resize(order, per_pass * count)[place * count : (place + 1) * count].tolist()

    def _others(self, rollout: int) -> Iterator[int]:
        """Yield the numbers of all prompts outside this rollout, in the order in which these
        prompts may replace prompts of the rollout."""
        order = np.random.default_rng([self.seed, rollout, 0, 1]).permutation(len(self._prompts))
        chosen = {*self._chosen(rollout)}
        return (int(number) for number in order if number not in chosen)

    @property
    def _rollouts_per_pass(self) -> int:
        return -(-len(self._prompts) // self._config.prompts_per_step)

    # -- a rollout -------------------------------------------------------------------------------

    def _roll_out(self, rollout: int) -> list[Sample]:
        """Make a rollout; return the samples to train. Raises RewardError for a group without
        rewards, unless --on-reward-error skips such groups."""
        own, drawn = self._config, []
        self._times = {"sample_ms": 0.0, "reward_ms": 0.0}
        chosen, others = self._chosen(rollout), self._others(rollout)
        for attempt in range(own.redraws + 1):
            drawn += self._drawn(rollout, attempt, chosen)
            teaching = sum(not each.equal for each in drawn if not each.problem)
            chosen = [*islice(others, own.prompts_per_step - teaching)]
            if not chosen:
                break
        kept, rows, trains_equal = [], [], own.keep_equal or self._teacher is not None
        for each in drawn:
            if each.problem:
                rows += self._failed(each.group, each.problem)
                continue
            of_group = advantages(each.rewards, scale=self._scale).tolist()
            parts = (each.made, each.group.texts, each.scores, of_group)
            for made, text, score, advantage in zip(*parts, strict=True):
                row = {"prompt": each.group.record["prompt"], "text": text, "rewards": score}
                rows.append(row | {"advantage": advantage, "finish": made.finish})
                if (not each.equal or trains_equal) and not self._is_skipped(made):
                    logprobs = [each if each is None else float(each) for each in made.logprobs]
                    kept.append(Sample(each.number, list(made.ids), logprobs, advantage))
        scored = [each for each in drawn if not each.problem]
        self.last = {**_of_lengths(drawn), **self._times}
        if self._reward is not None:
            shares = {"equal": sum(each.equal for each in scored) / len(drawn)}
            shares |= {"drawn": len(drawn), "failed": len(drawn) - len(scored)}
            self.last = {**_of_rewards(scored), **shares, **self.last}
        self._report(rows)
        return kept

    def _drawn(self, rollout: int, attempt: int, chosen: Sequence[int]) -> list[Drawn]:
        """Return samples of the chosen prompts, with the samples' rewards."""
        start, before = time.monotonic(), self._times["sample_ms"]
        how = ([self._prompts[n] for n in chosen], self._config.num_samples)
        records, places = ([of[n] for n in chosen] for of in (self._records, self._places))
        generate = partial(self._generated, rollout, attempt)
        if self._episodes is None:
            made, found = generate(0, *how), None
        else:
            episodes, found = self._episodes.play(*how, records, partial(_each_once, generate))
            made = [[Completion(e.ids, e.logprobs, e.finish) for e in group] for group in episodes]
        texts = [[self._tokenizer.decode(each.shown) for each in group] for group in made]
        groups = [Group(*each) for each in zip(texts, records, places, strict=True)]
        if found is None:
            nothing = [{REWARD: 0.0}] * self._config.num_samples
            found = self._reward(groups) if self._reward else [nothing] * len(groups)
        spent = 1000 * (time.monotonic() - start)
        self._times["reward_ms"] += spent - (self._times["sample_ms"] - before)
        drawn = [Drawn(*each) for each in zip(chosen, groups, made, found, strict=True)]
        if self._config.overlong_buffer:
            self._shorten(drawn)
        return drawn

    def _generated(
        self, rollout: int, attempt: int, turn: int, prompts: Sequence[list[int]], count: int
    ) -> list[list[Completion]]:
        """Generate `count` samples of each prompt; add the duration to the rollout's sample_ms."""
        own, trainer, start = self._config, self._trainer, time.monotonic()
        seed = np.random.SeedSequence([self.seed, rollout, attempt, turn])
        made = trainer.generate(
            prompts,
            num_samples=count,
            max_new_tokens=own.max_new_tokens,
            temperature=own.temperature,
            seed=int(seed.generate_state(1)[0]),
            stop=self._stop,
        )
        trainer.last_end = None  # a step's time excludes sampling
        self._times["sample_ms"] += 1000 * (time.monotonic() - start)
        return made

    def _shorten(self, drawn: Sequence["Drawn"]) -> None:
        """Lower the rewards of samples that reach into --overlong-buffer, by up to 1 at the
        buffer's end."""
        buffer = self._config.overlong_buffer
        free = self._config.max_new_tokens - buffer
        for each in drawn:
            for made, score in zip(each.made, () if each.problem else each.scores, strict=False):
                score["overlong"] = -min(max(len(made.ids) - free, 0) / buffer, 1.0)
                score[REWARD] += score["overlong"]

    def _is_skipped(self, made: Completion) -> bool:
        return self._config.skip_cut and made.finish == "length"

    def _failed(self, group: Group, problem: str) -> list[dict[str, Any]]:
        """Return the rows of the sample file for a group without rewards. Raises RewardError if a
        group without rewards stops the run."""
        line = f"{group.where}: the reward function {problem}"
        if self._config.on_reward_error == "stop":
            raise RewardError(f"{line}: mend it, or give --on-reward-error skip")
        warn(f"{line}: its samples are not trained")
        prompt = group.record["prompt"]
        return [{"prompt": prompt, "text": text, "error": problem} for text in group.texts]

    def announce(self, reporter: Reporter) -> None:
        """Print [Prompts], with the path of the sample file."""
        own, longest = self._config, max(map(len, self._prompts))
        self.reporter = reporter
        lines = [
            f"  {len(self._prompts)} prompts of at most {longest} tokens",
            f"  {own.prompts_per_step} prompts x {own.num_samples} samples of at most "
            f"{own.max_new_tokens} tokens, trained {own.updates} times",
            f"  Samples: `{samples_path(reporter.log.path)}`",
        ]
        reporter.block("Prompts", lines)

    def _report(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the numbers of the rollout, and append the rows to the sample file."""
        reporter, step, last = self.reporter, self._update, self.last
        if reporter is None:
            return
        reporter.log.write("rollout", step, **last)
        if "reward" in last:
            reporter.score("reward", last["reward"])
        text = f"{last['length']:.0f} tokens | sampled in {last['sample_ms'] / 1000:.1f} s"
        if self._reward is not None:
            text = (
                f"reward {last.get('reward', np.nan):.4f} | within groups ± "
                f"{last.get('reward_std', np.nan):.4f} | {last['equal']:.0%} equal groups | {text}"
            )
        reporter.line("R", step, text)
        reporter.view.progress(texts=_extremes(rows) if self._reward else {})
        path = samples_path(reporter.log.path)
        with disk_errors(path), open(path, "a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({"step": step} | dict(row), ensure_ascii=False) + "\n")

    # -- what a Trainer asks of its data ---------------------------------------------------------

    @property
    def batches_per_epoch(self) -> int:
        """Return the greatest number of micro-batches of each rank in a pass over all prompts."""
        of_step = self._config.grad_accumulation
        return self._rollouts_per_pass * self._config.updates * of_step

    @property
    def epoch(self) -> int:
        """Return the number of the present pass over all prompts, from 0."""
        return self._update // (self._rollouts_per_pass * self._config.updates)

    @property
    def passed(self) -> float:
        """Return the fraction of the present pass that was trained."""
        of_pass = self._rollouts_per_pass * self._config.updates
        return self._update % of_pass / of_pass

    @property
    def batches_left(self) -> int:
        """Return the greatest number of micro-batches of each rank that are left in the present
        pass."""
        return round((1 - self.passed) * self.batches_per_epoch)

    def step_batches(self, most: int) -> int:
        """Return the number of micro-batches of each rank in the next update. Makes the rollout
        first if the update has no samples yet. most: ignored, but DataLoader has this argument."""
        if self._sampled != self._rollout:
            self._samples, self._batches = self._roll_out(self._rollout), []
            self._sampled = self._rollout
        if not self._batches:
            self._batches = self._packed()
        return len(self._batches) // self._ranks

    @property
    def _rollout(self) -> int:
        return self._update // self._config.updates

    @property
    def _ranks(self) -> int:
        return len(self._trainer.ranks.devices)

    def _packed(self) -> list[Batch]:
        """Return the batches of an update. If the loss reads scores, the batches have scores of the
        teacher or of the reference model."""
        config, trainer = self._config, self._trainer
        shape = (config.batch_size, config.seq_len)
        batches = packed(self._samples, self._prompts, shape, self._ranks)
        if self._teacher is not None:
            scores = self._teacher.score(batches)
            pairs = zip(batches, scores, strict=True)
            return [b._replace(named={"scores": of_batch}) for b, of_batch in pairs]
        if not config.has_reference:
            return batches
        nothing = np.zeros(shape, np.float32)
        batches = [b._replace(named={**b.named, "scores": nothing}) for b in batches]
        given = [partial(Batch, *batch) for batch in batches]
        trainer.ranks.run("exchanging weights", partial(_exchange, back=False))
        try:
            losses = trainer.ranks.share("score", given, _scored)
        finally:
            trainer.ranks.run("exchanging weights", partial(_exchange, back=True))
        pairs = zip(batches, losses, strict=True)
        return [b._replace(named={**b.named, "scores": 0 - loss}) for b, loss in pairs]

    def next_batch(self) -> Batch:
        """Return the next micro-batch of the update; ranks take micro-batches in turn."""
        batch = self._batches[self._taken]
        self._taken += 1
        if self._taken == len(self._batches):
            self._update, self._taken = self._update + 1, 0
        return batch

    def state(self) -> dict[str, Any]:
        """Return the state before the next update, as JSON values. The state includes the samples
        if further updates train the same rollout."""
        state = {"seed": self.seed, "prompts": self._digest, "update": self._update}
        if self._update % self._config.updates:
            state["samples"] = [sample._asdict() for sample in self._samples]
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Return to a saved `state`. Raises DataError if the state belongs to other prompts."""
        if state.get("prompts") != self._digest:
            raise DataError(
                "the prompts, --prompts-per-step or --updates changed since the checkpoint: give "
                "those of the run, or --new-data to begin the prompts anew"
            )
        self.seed, self._update = state["seed"], state["update"]
        self._taken, self._sampled, self._batches = 0, None, []
        if "samples" in state:
            self._samples = [Sample(**sample) for sample in state["samples"]]
            self._sampled = self._rollout

    def reset(self) -> None:
        """Return to the position before the first rollout."""
        self._update, self._taken, self._sampled = 0, 0, None

    def close(self) -> None:
        """End the processes of the reward function, and free the teacher."""
        for each in (self._reward, self._teacher):
            if each is not None:
                each.close()


def _extremes(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the texts of the samples with the highest and the lowest reward, each as one line, by
    name; {} without rewards."""
    scored = [row for row in rows if "rewards" in row]
    if not scored:
        return {}
    found = {}
    for name, choose in (("best", max), ("worst", min)):
        row = choose(scored, key=lambda row: row["rewards"][REWARD])
        found[f"{name} {row['rewards'][REWARD]:.4g}"] = " ".join(row["text"].split())
    return found


def _of_rewards(scored: Sequence[Drawn]) -> dict[str, float]:
    """Return means of the reward and its components over samples, and the mean standard deviation
    within groups, by name; {} without groups."""
    if not scored:
        return {}
    every = [one for each in scored for one in each.scores]
    spread = [np.std(each.rewards, ddof=1) for each in scored]
    names = dict.fromkeys(name for one in every for name in one)
    means = {n: float(np.mean([one[n] for one in every if n in one])) for n in names}
    parts = {f"{REWARD}/{name}": mean for name, mean in means.items() if name != REWARD}
    return {REWARD: means[REWARD], "reward_std": float(np.mean(spread)), **parts}


def _of_lengths(drawn: Sequence[Drawn]) -> dict[str, float]:
    """Return the samples' mean length in tokens, and the fraction of samples that were cut."""
    every = [made for each in drawn for made in each.made]
    cut = sum(made.finish == "length" for made in every) / len(every)
    lengths = [sum(each is not None for each in made.logprobs) for made in every]
    return {"length": float(np.mean(lengths)), "cut": cut}


def _each_once(
    generate: Callable[..., list[list[Completion]]], turn: int, texts: Sequence[list[int]]
) -> list[Completion]:
    """Return one completion of each text of ids, in turn number `turn` of the episodes."""
    return [made for (made,) in generate(turn, texts, 1)]


def _exchange(rank: Rank, *, back: bool) -> None:
    rank.exchange_average(FIRST, back=back)


def _scored(rank: Rank, _: int, batch: Batch) -> np.ndarray:
    return rank.step.score(batch)
