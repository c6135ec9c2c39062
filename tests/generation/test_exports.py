"""The public names are sorted and each documented; the runtime imports neither training nor evaluation."""

import subprocess
import sys

import hf_lossy_assist


def test_all_is_sorted():
    assert hf_lossy_assist.__all__ == sorted(hf_lossy_assist.__all__)


def test_every_public_name_has_a_docstring():
    for name in hf_lossy_assist.__all__:
        assert (getattr(hf_lossy_assist, name).__doc__ or "").strip(), name


def test_the_runtime_imports_no_training_and_no_evaluation():
    code = (
        "import sys, hf_lossy_assist; "
        "bad = [m for m in sys.modules if m.startswith(('hf_lossy_assist.training', 'hf_lossy_assist.tasks', 'scipy.stats'))]; "
        "sys.exit(str(bad) if any(m.startswith('hf_lossy_assist') for m in bad) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
