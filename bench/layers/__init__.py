"""Layer skipping: the layers of a target that a self-draft should keep."""
