"""Write the wrong answers of the packaged data of ``preference``: those of a young ``sft`` model.

    python benchmarks/wrong_answers.py RUN

Then run ``packaged_rows.py``. RUN is a run of the packaged recipe sft that ended early:

    python -m oneloop.train sft --duration 150 --run.dir RUN
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from oneloop.tasks.sft import SFT
from packaged_rows import WRONG_ANSWERS, right_answers


def main(run: Path) -> None:
    task = SFT(layers=3, width=96, length=128)
    model = task.model().eval()
    model.load_state_dict(load_file(run / "final" / "model.safetensors"), strict=False)
    assert task.rows.chat is not None
    wrong = {}
    for question, right in right_answers():
        tokens = task.rows.chat.prompt([{"role": "user", "content": question}])
        with torch.no_grad():
            made = model.generate(
                torch.tensor([tokens]),
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=task.ends,
            )
        answer = task._answer(made[0, len(tokens) :].tolist()).strip()
        if answer and answer != right:
            wrong[question] = answer
    lines = [f"{question}\t{wrong[question]}\n" for question in sorted(wrong)]
    WRONG_ANSWERS.write_text("".join(lines))
    count = len([*right_answers()])
    print(f"{len(wrong)} of {count} questions have a wrong answer; {WRONG_ANSWERS}")


main(Path(sys.argv[1]))
