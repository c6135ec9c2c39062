"""AutoJudge: a head that accepts mismatches that do not change the answer."""
