"""What a compiled program really communicates, read from its HLO text."""

from gradaccum.audit._audit import assert_one_reduction as assert_one_reduction
from gradaccum.audit._audit import collectives as collectives
from gradaccum.audit._report import Collective as Collective
from gradaccum.audit._report import Report as Report
from gradaccum.audit._report import Total as Total

__all__ = ["Collective", "Report", "Total", "assert_one_reduction", "collectives"]
