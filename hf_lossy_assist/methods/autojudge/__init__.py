"""AutoJudge: a head that accepts mismatches which do not change the answer."""
