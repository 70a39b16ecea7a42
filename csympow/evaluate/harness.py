"""A trained run as a model of the lm-evaluation-harness (`pip install 'csympow[harness]'`).

    import lm_eval
    from csympow.evaluate.harness import CsympowLM

    print(lm_eval.simple_evaluate(model=CsympowLM("runs/X"), tasks=["lambada_openai", "wikitext"])["results"])

Nothing else in csympow imports this module, or the harness. The models have no longest context: a text of any length is
read as a whole, through the state, so no request is cut and rolling likelihoods need no windows.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from csympow.evaluate.answers import Answerer, Question, Reply
from csympow.evaluate.prompts import begin
from csympow.evaluate.runs import open_run

_WRITTEN = 256  # tokens, where a request names no number; the harness's own default


@register_model("csympow")
class CsympowLM(LM):
  """A run for the harness.

  Args:
    workdir: of the run.
    step: of the checkpoint; None: the newest that is whole.
  """

  def __init__(self, workdir: str | Path, step: int | None = None, **_: Any) -> None:
    super().__init__()
    self._run = open_run(Path(workdir), step)
    # Before the first token there is something in any case: the end of the text before, or of the line.
    start = begin(self._run)
    self._begin = start if len(start) else self._run.encode("\n")[-1:]

  def loglikelihood(self, requests: list[Instance], **_: Any) -> list[tuple[float, bool]]:
    """For each (context, continuation): the log-probability of the latter, and whether greedy would write it."""
    questions = [self._continuation(*request.args[:2]) for request in requests]
    return [(-float(reply.nll[0]), bool(reply.likeliest[0])) for reply in self._replies(questions)]

  def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
    """For each text: its log-probability, every token given all before it."""
    questions = [Question(self._begin, (self._run.encode(request.args[0]),)) for request in requests]
    return [-float(reply.nll[0]) for reply in self._replies(questions)]

  def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
    """For each (context, options): what greedy writes, up to the first of its stop strings."""
    questions, limits, stops = [], [], []
    for request in requests:
      context, options = request.args[:2]
      if options.get("do_sample") and options.get("temperature", 1.0) > 0:
        raise ValueError("csympow writes the likeliest token: ask for do_sample=False or temperature=0")
      until = options.get("until") or []
      stops.append([until] if isinstance(until, str) else list(until))
      limits.append(int(options.get("max_gen_toks") or _WRITTEN))
      questions.append(Question(self._prompt(context)))
    replies = self._replies(questions, max(limits, default=0))
    return [self._text(*found) for found in zip(replies, limits, stops, strict=True)]

  @property
  def tokenizer_name(self) -> str:
    """What a cache of requests is told apart by."""
    return self._run.tokenizer.sha256 if self._run.tokenizer is not None else ""

  def _prompt(self, context: str) -> Int[np.ndarray, "n"]:
    return np.concatenate([self._begin, self._run.encode(context)])

  def _continuation(self, context: str, continuation: str) -> Question:
    """Tokenised as one text, and cut where the context's own tokens end: a space belongs to the word behind it."""
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    whole, first = self._run.encode(kept + continuation), self._run.encode(kept)
    return Question(np.concatenate([self._begin, whole[: len(first)]]), (whole[len(first) :],))

  def _replies(self, questions: Sequence[Question], count: int = 0) -> list[Reply]:
    """In the order of the questions, asked in that of their lengths."""
    if not questions:
      return []
    longest = max(len(question.prompt) for question in questions)
    answer = max((len(one) for question in questions for one in question.answers), default=1)
    # Rounded up, so that calls share their programs.
    answerer = Answerer(self._run.model, _power_of_two(longest), _power_of_two(answer), count)
    order = sorted(range(len(questions)), key=lambda i: len(questions[i].prompt) + sum(map(len, questions[i].answers)))
    found: dict[int, Reply] = dict(zip(order, answerer.replies([questions[i] for i in order]), strict=True))
    return [found[i] for i in range(len(questions))]

  def _text(self, reply: Reply, limit: int, stops: Iterable[str]) -> str:
    text = self._run.decode(reply.written[:limit])
    for stop in stops:
      text = text.split(stop)[0] if stop else text
    return text


def _power_of_two(n: int) -> int:
  return 1 << max(0, n - 1).bit_length()
