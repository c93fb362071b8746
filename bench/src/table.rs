//! Tables with aligned columns.

/// Lines of cells. The first `left` columns are words, the others numbers.
pub(crate) fn table(left: usize, lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        lines.iter().filter_map(|line| line.get(column)).map(|c| c.chars().count()).max()
    };
    let widths: Vec<usize> = (0..columns).filter_map(width).collect();
    let mut text = String::new();
    for line in lines {
        let mut shown = String::new();
        for (column, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            shown += &if column < left {
                format!("{gap}{cell:<width$}")
            } else {
                format!("{gap}{cell:>width$}")
            };
        }
        text += shown.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stand_left_and_numbers_right() {
        let lines = [["a", "ms"], ["long", "12.5"], ["b", "3"]];
        let lines = lines.map(|line| line.map(str::to_owned).to_vec());
        assert_eq!(table(1, &lines), "a       ms\nlong  12.5\nb        3\n");
    }
}
