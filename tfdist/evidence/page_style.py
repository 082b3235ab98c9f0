"""How the page of a comparison looks: light and dark, on a phone and on a desktop. The page needs no other file."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root { color-scheme: light dark;
  --ground: #ffffff; --box: #f4f6f8; --ink: #1b1f24; --quiet: #59616d; --line: #d5dae0;
  --same: #00663f; --rounding: #0b5394; --different: #b3261e; --unknown: #59616d; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #14171c; --box: #1d2128; --ink: #e6e8eb; --quiet: #a3acb8; --line: #343b45;
  --same: #4fd39b; --rounding: #7fbcf5; --different: #ff8a80; --unknown: #a3acb8; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: clamp(2.6rem, 9vw, 4rem); line-height: 1.1; margin: .3rem 0 .6rem; overflow-wrap: normal; }
h2 { font-size: 1.35rem; line-height: 1.25; margin: 2.6rem 0 .8rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; line-height: 1.35; margin: 1.6rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; }
.same { color: var(--same); } .rounding { color: var(--rounding); }
.different { color: var(--different); } .unknown { color: var(--unknown); }
.lead { font-size: 1.15rem; }
.quiet, figcaption, small { color: var(--quiet); }
.label { display: inline-block; border: 1px solid currentColor; border-radius: .3rem; padding: 0 .4rem;
  font-size: .85rem; font-weight: 600; }
.box { overflow-x: auto; border: 1px solid var(--line); border-radius: .4rem; margin: .8rem 0; }
.box:focus-visible { outline: 2px solid var(--rounding); }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .92rem;
  line-height: 1.35; overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: .45rem .55rem; border-top: 1px solid var(--line); }
thead th { border-top: 0; background: var(--box); vertical-align: bottom; font-weight: 600; }
tr > :first-child { position: sticky; left: 0; background: var(--ground); }
thead tr > :first-child { background: var(--box); }
.hint { display: none; }
tbody th { font-weight: 600; min-width: 8.5rem; overflow-wrap: anywhere; }
td { white-space: nowrap; }
.line { white-space: nowrap; }
td:not(.number) { white-space: normal; min-width: 7rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
small { font-size: .82rem; font-weight: 400; }
code, pre { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .86em; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .8rem;
  margin: .4rem 0 1rem; white-space: pre-wrap; }
figure { margin: 0 0 1.8rem; }
figure h3 { margin-top: 1.4rem; }
img { display: block; max-width: 100%; height: auto; }
figcaption { font-size: .92rem; margin-top: .4rem; max-width: 46rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .5rem 1.5rem; margin: .8rem 0; }
dt { color: var(--quiet); font-size: .85rem; }
dd { margin: 0; }
details { margin: .6rem 0; }
summary { cursor: pointer; padding: .3rem 0; font-weight: 600; }
@media (max-width: 719px) { .hint { display: block; } th, td { padding: .4rem .5rem; }
  img { width: 100%; max-width: 30rem; } dl { grid-template-columns: 1fr 1fr; } }
"""
