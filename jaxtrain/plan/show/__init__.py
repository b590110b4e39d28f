"""Showing a plan: tables that terminal and page share, drawings, JSON."""
