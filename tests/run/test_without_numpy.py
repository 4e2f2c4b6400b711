"""A plain installation has neither NumPy nor llvmlite: it saves, resumes, dumps and checks itself all the same."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import lockstep

HIDE = """
import sys
from importlib.machinery import PathFinder

class Hiding:
    def find_spec(self, name, path=None, target=None):
        is_hidden = name.partition(".")[0] in ("numpy", "llvmlite")
        return None if is_hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding()
"""

SCRIPT = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch
import lockstep

def trained(epochs, then):
    run = lockstep.start(lanes=2, seed=1)
    torch.manual_seed(4)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    run.replicate(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
    loader = run.shard(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    found = then(run)
    for _ in run.epochs(epochs):
        for batch in loader:
            for x, y in run.lanes(batch):
                torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run, found

folder = Path(sys.argv[1])
run, _ = trained(2, lambda run: run.checkpoints(folder / "auto", every_steps=2))
wanted = run.digest()
run.close()
os.environ["LOCKSTEP_DUMP"] = str(folder / "final.safetensors")
run, went_on_from = trained(2, lambda run: run.checkpoints(folder / "auto", every_steps=2))
equal = [run.digest() == wanted]
run.save(folder / "saved")
run.close()
run, resumed = trained(2, lambda run: run.resume(folder / "saved"))
equal.append(run.digest() == wanted)
run.close()
from lockstep.programs.doctor.checkpoint_trial import save_and_load
save_and_load(folder)
print(json.dumps([went_on_from, resumed, equal, "numpy" in sys.modules]))
"""


@pytest.mark.soak
def test_a_run_without_numpy_saves_resumes_and_dumps(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HIDE + SCRIPT, str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    went_on_from, resumed, equal, has_numpy = json.loads(ended.stdout.splitlines()[-1])
    assert went_on_from >= 2  # a save that is due while another is under way is put off
    assert (resumed, equal, has_numpy) == (6, [True, True], False)
    assert "could not be saved" not in ended.stdout + ended.stderr
    assert load_file(tmp_path / "final.safetensors").keys() >= {"weight", "bias", "optimizer/weight/exp_avg"}


def test_no_file_of_the_package_imports_numpy() -> None:
    for path in Path(lockstep.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(text if "numpy" in (text := path.read_text()) else "")):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.partition(".")[0] == "numpy"], path
