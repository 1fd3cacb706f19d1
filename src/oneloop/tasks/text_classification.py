"""Text classification; the packaged data are code snippets, whose class is the package."""

from collections import Counter
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.tasks.labels import OneClass
from oneloop.tasks.rows.open_data import Data
from oneloop.tasks.rows.text_files import TextFile, held_out_files, stdlib
from oneloop.tasks.text_rows import TextRows


class TextClassification(OneClass, TextRows):
    """Classification of texts or pairs of texts.

    Args:
        data: stdlib (snippets of Python's standard library; the class is the package); a file or
            folder of parquet, json lines, csv or arrow; hf:NAME[:CONFIG][@REVISION]; parquet at
            s3://, gs:// (not tested), hf://datasets/ or https://; or several,
            [{data: PATH, weight: 0.7}, …].
        text: column of the text.
        second: column of the second text, for pairs.
        label: column of the class.
        packages: number of packages (the largest of the standard library).
        lines: lines per snippet.
    """

    needs = TextRows.needs | {
        "held_out": "data!=stdlib",
        "split_by": "data!=stdlib",
        "stream": "data!=stdlib",
        "packages": "data=stdlib",
        "lines": "data=stdlib",
    }

    def __init__(
        self,
        data: Data = "stdlib",
        text: str = "text",
        second: str = "",
        label: str = "label",
        packages: int = 8,
        lines: int = 12,
        **reading: Any,
    ) -> None:
        user_data = None if data == "stdlib" else data
        columns = {"text": text, "second": second, "label": label}
        super().__init__(user_data, columns, **reading)
        if user_data is None:
            splits = _snippets(packages, lines)
            self.classes = sorted({label for _, label in splits["train"]})
            number = {label: index for index, label in enumerate(self.classes)}
            encode = self.reader.encode
            for name, split in splits.items():
                self._sets[name] = [(encode(text), number[label]) for text, label in split]

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = self.reader.logits(model, batch)
        each = F.cross_entropy(logits, batch["label"], reduction="none")
        return each.sum(), {"logits": logits.detach(), "loss": each.detach()}

    def show(self, sample: tuple[Any, int], outputs: dict[str, Tensor]) -> dict[str, Any]:
        text, label = sample
        return {"text": self.reader.decode(text), **self.judged(label, outputs)}


def _snippets(packages: int, lines: int) -> dict[str, list[tuple[str, str]]]:
    """Return snippets of the largest packages by split; no file is in two splits."""
    # Choose the files of the largest packages.
    files = [file for file in stdlib() if "/" in file.name]
    size = Counter[str]()
    for file in files:
        size[_package(file)] += len(file.text)
    largest = {name for name, _ in size.most_common(packages)}
    chosen = [file for file in files if _package(file) in largest]

    # Cut them into snippets, without blank lines.
    splits: dict[str, list[tuple[str, str]]] = {}
    for split, own in held_out_files(chosen, percent=10).items():
        splits[split] = []
        for file in own:
            package = _package(file)
            code = [line for line in file.text.splitlines() if line.strip()]
            for start in range(0, len(code), lines):
                snippet = "\n".join(code[start : start + lines])
                splits[split].append((snippet, package))
    return splits


def _package(file: TextFile) -> str:
    """Return the name of the package that a file is in."""
    return file.name.split("/")[0]
