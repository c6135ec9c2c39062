"""Names of this subpackage, imported on first use; read by `__init__.py` and by type checkers."""

from .autojudge.classifiers import JudgeSettings as JudgeSettings
from .autojudge.dataset import RECORD as RECORD
from .autojudge.dataset import explain_nothing as explain_nothing
from .autojudge.dataset import explain_unsearched as explain_unsearched
from .autojudge.fit import JudgeReport as JudgeReport
from .autojudge.fit import fit_autojudge as fit_autojudge
from .autojudge.mine import MineSettings as MineSettings
from .autojudge.mine import mine as mine
from .eagle3.collect import TextDataset as TextDataset
from .eagle3.collect import TextSettings as TextSettings
from .eagle3.collect import collect_texts as collect_texts
from .eagle3.fit import fit_drafter as fit_drafter
from .sprinter.collect import CollectSettings as CollectSettings
from .sprinter.collect import collect as collect
from .sprinter.fit import fit_specdec as fit_specdec
from .sprinter.fit import fit_sprinter as fit_sprinter
from .sv.collect_samples import ProfileSettings as ProfileSettings
from .sv.profiling import profile as profile
