"""What fuzzing kept, and a few new cases of every target, always the same ones: no crash, no hang, and honest callers
are served exactly as before. `python -m tests.fuzz.run` and `tests.fuzz.coverage` look further.
"""

import pytest

from tests.fuzz.run import TARGETS
from tests.fuzz.running import fuzzed

# Slow ones wait for answers that never come.
_EXAMPLES = {"rogue draft": 15, "rogue target": 40}


@pytest.mark.parametrize("name", TARGETS)
def test_any_case_ends_well_and_harms_nobody(name: str) -> None:
    with fuzzed(name, TARGETS[name]) as running:
        running.golden()
        running.replay()
        running.explore(_EXAMPLES.get(name, 60))
        running.golden()
