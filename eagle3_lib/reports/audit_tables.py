"""Tables of an audit for notebook 06."""

import pandas as pd


def scores_table(found: dict) -> pd.DataFrame:
    """The values that were tried, best first, with the gain over config.json and its 95 % interval."""
    rows = [
        {
            "with": row["name"],
            "accepted in a round": row["accepted"],
            "with config.json": row["of_config"],
            "gain": row["gain"]["value"],
            "at least": row["gain"]["low"],
            "at most": row["gain"]["high"],
        }
        for row in found.get("scores", [])
    ]
    return pd.DataFrame(rows).round(3)


# --- showing ----------------------------------------------------------------------------------------------------------


def table(rows: list[dict]) -> pd.DataFrame:
    """The matrix with engine versions as columns: captured boundaries, the worst severity, then each rule found."""
    columns = {}
    for row in rows:
        star = "*" if row["runner"] and row["default_runner"] else ""
        title = f"{row['engine']} {row['version']} {row['runner']}".strip() + star
        cells = {finding["rule"]: finding["severity"] for finding in row["findings"]}
        columns[title] = {"captured": str(row["boundaries"]), "worst": row["worst"], **cells}
    return pd.DataFrame(columns).fillna("")
