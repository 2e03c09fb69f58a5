"""`llmq eval --tasks`: tasks of lm-evaluation-harness, computed by llmq.

The harness provides tasks, prompts and metrics. `Harness` implements the harness's model interface
with `Fleet` and `Generator`, without torch.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import check_writable, write_file
from llmq.model.generator import Request as Continued
from llmq.run.evaluate import Asker, asking
from llmq.run.sampling import SLOTS, Sampler, conversation, seed_of
from llmq.text.scoring import Request
from llmq.text.stop_strings import until
from llmq.text.tokenizer import streamed

NEW_TOKENS = 256  # most tokens of a generated answer, unless the task sets a number


class Harness(TemplateLM):
    """A model for lm-evaluation-harness, which loads its weights anew for each kind of request."""

    def __init__(self, asker: Asker):
        super().__init__()
        self._asker, self._config, self._longest = asker, asker.config, asker.longest
        self._encoder, self._tokens = asker.encoder, asker.encoder.tokenizer
        self._chat = conversation(self._tokens, None)

    # -- tokens ------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        if self._tokens.eos_id is None:
            raise LlmqError("the tokenizer has no token that ends a text")
        return self._tokens.eos_id

    @property
    def prefix_token_id(self) -> int:
        if self._tokens.prefix_id is None:
            raise LlmqError("the tokenizer has no token that begins a text")
        return self._tokens.prefix_id

    @property
    def max_gen_toks(self) -> int:
        return NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self._tokens, "folder", "bytes")).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        if add_special_tokens is False:
            return list(self._tokens.encode(string))
        (ids,) = self._encoder.encode([string])
        return ids.tolist()

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if not chat_template:
            return None
        if self._chat is None:
            raise ConfigError("--apply-chat-template: the tokenizer has no chat template")
        return str(self._chat.template.origin)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self._chat.text(chat_history, add_generation_prompt=add_generation_prompt)

    # -- likelihoods -----------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        asked = []
        for (_, continuation), context, ids in requests:
            if not 0 < len(ids) <= self._longest:
                raise LlmqError(
                    f"an answer has {len(ids)} tokens, a sequence {self._longest}: "
                    f"{continuation[:40]!r}"
                )
            tokens = np.array([*context, *ids], np.int32)
            asked.append(Request(tokens[-(self._longest + 1) :], len(ids)))
        return self._likelihoods(asked)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        texts = self._encoder.encode([request.args[0] for request in requests])
        windows = [self._encoder.windows(ids) for ids in texts]
        found = iter(self._likelihoods([window for each in windows for window in each]))
        return [sum(next(found)[0] for _ in each) for each in windows]

    def _likelihoods(self, requests: list[Request]) -> list[tuple[float, bool]]:
        """Return for each request its log-likelihood in nats, and True if its tokens are the
        likeliest."""
        if not requests:
            return []
        values, greedy = self._asker.scored(requests, greedy=True)
        return [(float(value), greedy[i]) for i, value in enumerate(values)]

    # -- texts -----------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        end, asked, stops = self.eot_token_id, [], []
        ends = frozenset([end, *self._config.eos_token_ids])
        for number, request in enumerate(requests):
            context, given = request.args
            how = normalize_gen_kwargs(given, NEW_TOKENS)
            stops.append(handle_stop_sequences(how.pop("until", None), eos=None))
            count = min(how["max_gen_toks"], self._longest - 1)
            ids = self.tok_encode(context)[-(self._longest - count) :]
            sampled = how.get("do_sample", False)
            asked.append(
                Continued(
                    ids,
                    count,
                    temperature=how.get("temperature", 1.0) if sampled else 0.0,
                    top_k=how.get("top_k") or 0,
                    top_p=how.get("top_p") or 1.0,
                    seed=seed_of(0, number),
                    stop=ends,
                )
            )
        model, slots = self._asker, min(SLOTS, len(asked))
        sampler = Sampler(
            model.machine, model.config, lambda w: w.load(model.read), model.longest, model.dtype,
            slots, model.base_dtype,
        )  # fmt: skip
        with sampler, sampler.texts(asked) as texts:
            return [
                "".join(until(streamed(self._tokens, list(each.prompt), ids), stop))
                for each, ids, stop in zip(asked, texts, stops, strict=True)
            ]


def run_harness(
    model: str,
    tasks: str,
    *,
    num_fewshot: int | None,
    apply_chat_template: bool,
    include_path: Path | None,
    limit: int | None,
    out: Path | None,
    **how: Any,
) -> None:
    """Print the harness's table for a model, and write the results to `out` as JSON. tasks: names
    of tasks, separated by commas. include_path: folder of further tasks. limit: most documents of
    each task. how: arguments of `asking`. Raises ConfigError for an unknown task."""
    if out is not None:
        check_writable("--out", out.absolute().parent)
    names = [name for name in tasks.split(",") if name]
    manager = TaskManager(include_path=include_path and str(include_path))
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown or not names:
        raise ConfigError(f"--tasks: lm-eval has no task {', '.join(unknown) or tasks!r}")
    with asking(model, **how) as asker:
        if asker.config.num_labels:
            raise ConfigError("--tasks: the model has a score head, which predicts no tokens")
        results = simple_evaluate(
            Harness(asker),
            tasks=names,
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=apply_chat_template,
        )
    print(make_table(results))
    if out is not None:
        kept = {name: results[name] for name in ("results", "versions", "n-shot", "n-samples")}
        write_file(out, json.dumps({"model": model} | kept, indent=2, default=str) + "\n")
