"""The papers' tables and figures beside what simulation and the planner say. Plain Python."""
