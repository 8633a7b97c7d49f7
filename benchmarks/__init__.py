"""Measurements: a script for each question, run from the checkout as `python -m benchmarks.NAME --help`.

| script | question |
|---|---|
| multiturn | how fast a server of OpenAI's API answers conversations: open loop, closed loop, or a trace |
| compare | the same load on several servers that take turns (`contenders/*.toml`) |
| ttft | where the time to the first token goes in a disaggregated cluster |
| stall | how long the tokens of a stream wait while another conversation's pages move |
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
