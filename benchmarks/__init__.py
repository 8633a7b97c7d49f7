"""Measurements: a script for each question, run from the checkout as `python -m benchmarks.NAME --help`.

| script | question |
|---|---|
| compare | the same conversations on several servers that take turns (`contenders/*.toml`, or URLs) |
| claude | turns as Claude Code holds them, with its changing line passed on and taken out |
| coding | sessions of coding agents, made and sent by AIPerf |
| spread | prefix groups over eight workers, with and without affinity and pool, by simulation |
| soak | hours of turns under kills and upgrades: what hangs, is wrong, or grows |
| ttft | where the time to the first token goes in a disaggregated cluster |
| router | what a router adds and can take, beside other routers |
| pool | how fast a pool node moves pages, beside a memory copy, `ucx_perftest` and Mooncake |
| beside | what pages that move cost the steps of a scheduler, and steps the pages |
| tier | how fast the SSD tier reads and writes, beside plain direct I/O |
| weights | how fast a model's weights come from the pool, beside SGLang's own loader |
| policies | hit rates of the eviction policies on a trace |
| simulate | what numbers of workers make of a load, by a simulation of the router's decisions |
| run_all | those of a release, in half an hour |

They are not installed, and start their processes with what `tests.support` has for it. Each prints its
command, commit and machine first; `--format markdown` prints what docs/benchmarks.md shows, `--format json`
the raw lines kept in `results/`.
"""
