# SPDX-License-Identifier: Apache-2.0
"""The offline side of slimrt: conversion, folding, and what a fold costs in precision."""
