"""The choice among the processor's kernel layouts: by request, by trial, by speed."""
