"""Record lm-eval's results on the models and tasks of tests/eval_data.py, the reference of `llmq
eval`.

    python tools/eval_reference.py        # writes tests/run/golden/lm_eval.json; needs lm-eval

lm-eval's published task definitions run on local files.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "run" / "golden" / "lm_eval.json"
# Paths of task definitions in lm-eval's folder; plain texts have no definition.
DEFINED = {
    "hellaswag": "hellaswag/hellaswag.yaml",
    "arc": "arc/arc_easy.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "mmlu": "mmlu/default/mmlu_high_school_biology.yaml",
}
TEXTS = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [
        {"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
    ],
}


def _definition(kind: str, path: Path, number: int) -> dict[str, Any]:
    """lm-eval's task definition on a local file."""
    from lm_eval import tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    folder = Path(tasks.__file__).parent
    config = dict(load_yaml(folder / DEFINED[kind])) if kind in DEFINED else dict(TEXTS)
    for name in ("tag", "task_alias", "dataset_name", "training_split", "validation_split"):
        config.pop(name, None)
    for name in ("fewshot_split", "fewshot_config", "should_decontaminate"):
        config.pop(name, None)
    files = {"data_files": {"test": str(path)}}
    return config | {
        "task": f"{kind}_{number}",
        "dataset_path": "json",
        "dataset_kwargs": files,
        "test_split": "test",
    }


def reference(model: Path, tasks: dict[str, Path], number: int) -> dict[str, Any]:
    """Return, for each kind of task, lm-eval's metrics and the log-likelihoods of all requests.
    number: a number that no other call has, for unique task names."""
    os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    import lm_eval

    given = {"pretrained": str(model), "dtype": "float32", "device": "cpu"}
    done = lm_eval.simple_evaluate(
        model="hf",
        model_args=given,
        tasks=[_definition(kind, path, number) for kind, path in tasks.items()],
        batch_size=4,
        bootstrap_iters=2,
    )
    found = {}
    for kind in tasks:
        task = f"{kind}_{number}"
        samples = sorted(done["samples"][task], key=lambda sample: sample["doc_id"])
        likelihoods = [
            float(r if kind == "text" else r[0]) for s in samples for r in s["filtered_resps"]
        ]
        metrics = {
            name.removesuffix(",none"): value
            for name, value in done["results"][task].items()
            if name.endswith(",none") and isinstance(value, float)
        }
        found[kind] = {"metrics": metrics, "likelihoods": likelihoods}
    return found


def references(folder: Path) -> dict[str, Any]:
    """Return the references of both models, by whether the tokenizer adds a first token."""
    from tests.eval_data import write_model, write_tasks

    tasks = write_tasks(folder)
    found = {}
    for number, (name, adds_bos) in enumerate({"plain": False, "bos": True}.items()):
        (folder / name).mkdir()
        model = write_model(folder / name, adds_bos=adds_bos)
        found[name] = reference(model, tasks, number)
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        GOLDEN.write_text(json.dumps(references(Path(folder)), indent=1) + "\n")
    print(f"wrote {GOLDEN}")
