#!/usr/bin/env bash
# Builds the images kvferry-router, kvferry-daemon and kvferry-worker with docker or buildah, whichever works here.
#
#   docker/build.sh [OPTION OF THE BUILDER...]
#   docker/build.sh --build-arg BASE=ubuntu:24.04
#   docker/build.sh --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128
#
# TAG (default: latest) names the images' tag; TARGETS (default: router daemon worker) which to build.
set -euo pipefail
cd "$(dirname "$0")/.."

if docker info >/dev/null 2>&1; then
  build=(docker build)
elif command -v buildah >/dev/null; then
  # The docker format keeps health checks.
  build=(buildah build --format docker)
else
  echo 'Neither a docker engine nor buildah is here; on Debian and Ubuntu: apt-get install buildah' >&2
  exit 2
fi

for target in ${TARGETS:-router daemon worker}; do
  "${build[@]}" --file docker/Dockerfile --target "$target" --tag "kvferry-$target:${TAG:-latest}" "$@" .
done
