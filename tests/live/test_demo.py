"""`make demo`, from the first line to the last."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from models import ROOT_PLACEHOLDER
