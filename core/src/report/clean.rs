//! Makes text from a file safe to print.

use serde_json::Value;

/// The most characters of one text.
const MOST: usize = 2000;

/// Makes every text in `value` safe for a terminal. The recursion is bounded, as the parser limits
/// the depth of a value.
pub(crate) fn clean(value: &mut Value) {
    match value {
        Value::String(text) => clean_text(text),
        Value::Array(items) => items.iter_mut().for_each(clean),
        Value::Object(fields) => fields.values_mut().for_each(clean),
        _ => {}
    }
}

fn clean_text(text: &mut String) {
    let unfit =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if text.chars().any(unfit) || text.chars().count() > MOST {
        *text = text.chars().take(MOST).map(|c| if unfit(c) { ' ' } else { c }).collect();
    }
}
