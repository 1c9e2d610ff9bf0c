"""The choice among the processor's kernel layouts: by request, by trial, by speed."""

from edgespec.base.prebuilt import prepare_loading

prepare_loading()
