"""Layer skipping: which layers of a target a self-draft should keep."""
