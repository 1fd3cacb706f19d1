"""Metrics of generated texts beside reference texts, computed by torchmetrics.

>>> class Translation(WritesTexts):
...     text_metrics = ["exact_match", "bleu"]
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from oneloop.tasks.language.generation import TIES
from oneloop.tasks.language.kept_texts import first_answer

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
DEFAULT = ["exact_match", "bleu", "chrf", "rouge1", "rouge2", "rougeL"]
"""names of the metrics that a task computes by default"""
_KNOWN = ("exact_match", "bleu", "chrf", *ROUGE)


def check_text_metrics(names: Sequence[str]) -> None:
    """Raise ValueError if a metric is unknown, or lacks its data.

    Args:
        names: the value of ``task.text_metrics``.
    """
    for name in names:
        if name not in _KNOWN:
            raise ValueError(f"task.text_metrics: {name!r} is unknown; known: {', '.join(_KNOWN)}")
    if not names:
        raise ValueError("task.text_metrics is empty; name at least one, such as exact_match")
    if "rougeLsum" not in names:
        return

    # nltk and its data find the sentences for rougeLsum.
    try:
        from nltk.tokenize import sent_tokenize  # type: ignore[import-not-found]

        sent_tokenize("One. Two.")
    except (ImportError, LookupError) as error:
        raise ValueError(
            "task.text_metrics: rougeLsum needs nltk and its data punkt_tab, which are not "
            "installed; use rougeL, or install both (pip install nltk; python -m nltk.downloader "
            "punkt_tab)"
        ) from error


def words(text: str) -> str:
    """Return the words of a text for ROUGE: in lower case, without punctuation.

    Letters and digits of all alphabets count. The rouge_score package, and torchmetrics by
    default, drop those outside of a-z and 0-9.

    Args:
        text: any text.
    """
    return re.sub(r"[\W_]+", " ", text.lower())


class WritesTexts:
    """Base class of tasks whose models write texts, which are compared with their targets."""

    writes = True
    counts_whole_texts = True
    beams = 1  # of the beam search
    text_metrics: Sequence[str]
    tokenizer: Any

    def generated_metrics(self) -> Any:
        """Return a new torchmetrics.MetricCollection. All values are between 0 and 1.

        ``exact_match`` counts texts that are equal after removing spaces at both ends. ``bleu``
        (Papineni et al. 2002) is that of the corpus, with the tokens "13a" of sacrebleu; ``chrf``
        (Popovic 2015) that of the corpus, of characters only; ``rouge1``, ``rouge2``, ``rougeL``
        and ``rougeLsum`` (Lin 2004) are the mean F1 of :func:`words`. ``near_ties`` counts the
        texts that rounding could change, unless there are several beams.
        """
        from torchmetrics import MeanMetric, MetricCollection, SumMetric
        from torchmetrics.text import CHRFScore, ROUGEScore, SacreBLEUScore

        class ExactMatch(MeanMetric):
            """The mean of 0 (another text) and 1 (the same text)."""

            higher_is_better = True  # type: ignore[assignment]

        keys = tuple(name for name in self.text_metrics if name in ROUGE)

        class Rouge(ROUGEScore):
            """ROUGE whose results are only the F1, named as here."""

            def compute(self) -> dict[str, torch.Tensor]:
                values = super().compute()
                return {key: values[f"{key}_fmeasure"] for key in keys}

        metrics: dict[str, Any] = {}
        if "exact_match" in self.text_metrics:
            metrics["exact_match"] = ExactMatch()
        if "bleu" in self.text_metrics:
            metrics["bleu"] = SacreBLEUScore(tokenize="13a")
        if "chrf" in self.text_metrics:
            metrics["chrf"] = CHRFScore(n_word_order=0)
        if keys:
            metrics["rouge"] = Rouge(rouge_keys=keys, normalizer=words, tokenizer=str.split)
        if self.beams == 1:
            metrics[TIES] = SumMetric()

        # Sums of many characters are exact only in float64.
        for metric in metrics.values():
            metric.set_dtype(torch.float64)
        return MetricCollection(metrics)

    def update_generated(self, metrics: Any, batch: dict[str, Any], texts: list[str]) -> None:
        """Compare each text with the first answer of its sample."""
        references = [text or "" for text in self._references(batch)]
        for name, metric in metrics.items():
            if name == "exact_match":
                same = [a.strip() == b.strip() for a, b in zip(texts, references, strict=True)]
                metric.update(torch.tensor(same, dtype=torch.float64, device=metric.device))
            elif name == TIES:
                metric.update(batch[TIES].to(metric.device))
            elif name == "rouge":
                metric.update(texts, references)
            else:
                metric.update(texts, [[reference] for reference in references])

    def _references(self, batch: Mapping[str, Any]) -> list[str | None]:
        """Return the first trained answer of each sample as text; None if there is none."""
        texts = list[str | None]()
        for text, target in zip(batch["text"], batch["target"].tolist(), strict=True):
            tokens = first_answer(target)
            # The entry ``text`` has what the tokens do not give back.
            texts.append(text or (self._answer(tokens) if tokens else None))
        return texts

    def _answer(self, tokens: list[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
