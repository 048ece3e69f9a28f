#!/bin/sh
# Makes the pictures of docs/report.md from the results of README.md's commands: sh docs/screenshots.sh results/plain results/lpes
set -e
pages=$(mktemp -d)
shot() { # page, window, picture, further options of Chromium
  page=$1 size=$2 picture=$3
  shift 3
  chromium --headless --no-sandbox --hide-scrollbars --virtual-time-budget=2000 --window-size="$size" --screenshot="docs/$picture" "$@" "file://$page"
}
lpes-eval report "$@" -o "$pages/report.html"
shot "$pages/report.html" 1200,985 report.png
lpes-eval attention reference --factors reference --questions 4 -o "$pages/attention"
cp "$pages/attention/attention.png" docs/report-attention.png
rm -r "$pages"
