"""The page of benchmarks: stored records, the page and pictures made of them, and what to run."""
