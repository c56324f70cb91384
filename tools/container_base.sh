#!/bin/sh
# Make a base image with Python from Debian's packages, for a machine that reaches no container
# registry. Needs root, debootstrap and buildah.
#
#   tools/container_base.sh [IMAGE]      default: localhost/baton-base:bookworm
#   CONTAINER_TEST_BASE=localhost/baton-base:bookworm .venv/bin/python -m pytest -m containers tests/containers
set -eu
image=${1:-localhost/baton-base:bookworm}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

debootstrap --variant=minbase \
  --include=python3,python3-venv,python3-pip,python-is-python3,ca-certificates \
  bookworm "$root" >&2
# Python expects what the official image of Python has: a pip that installs beside Debian's own.
rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/doc/* \
  "$root"/usr/share/locale/*

container=$(buildah from scratch)
buildah add --quiet "$container" "$root" / >&2
buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
buildah commit --quiet --rm "$container" "$image" >&2
echo "$image"
