use std::collections::HashMap;

use super::*;

const TOKENS: usize = 3;
const HIDDEN: usize = 8;

/// The tensors of a file to write: name, type, shape, bytes.
type Tensors = Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)>;

fn tensors() -> Tensors {
    let x = RowType::F32.encode(&[0.5; TOKENS * HIDDEN]);
    let idx = [0i64, 3, 1, -1, 2, 3].iter().flat_map(|i| i.to_le_bytes()).collect();
    let weights = RowType::F32.encode(&[0.25; 6]);
    vec![
        ("x", Dtype::F32, vec![TOKENS, HIDDEN], x),
        ("topk_idx", Dtype::I64, vec![TOKENS, 2], idx),
        ("topk_weights", Dtype::F32, vec![TOKENS, 2], weights),
    ]
}

fn bytes(tensors: &Tensors, experts: Option<&str>) -> Vec<u8> {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (*name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let metadata = experts.map(|e| HashMap::from([(EXPERTS_KEY.to_owned(), e.to_owned())]));
    safetensors::serialize(views, metadata).unwrap()
}

/// The message for a file whose tensors were changed by `change`.
fn refusal(change: impl FnOnce(&mut Tensors)) -> String {
    let mut tensors = tensors();
    change(&mut tensors);
    let error = InputFile::parse(&bytes(&tensors, Some("4"))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    error.to_string()
}

fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

#[test]
fn a_file_without_ranks_is_dealt_out_in_order_and_evenly() {
    let file = InputFile::parse(&bytes(&tensors(), Some("4"))).unwrap();
    let case = file.case(2, None).unwrap();
    assert_eq!(case.tokens, Tokens::Exactly(vec![1, 2]));
    assert_eq!((case.experts, case.topk, case.hidden, case.max_tokens), (4, 2, HIDDEN, 2));
    let inputs = file.inputs(&case).unwrap();
    assert_eq!(inputs.ranks[0].topk_idx, [0, 3]);
    assert_eq!(inputs.ranks[1].topk_idx, [1, -1, 2, 3]);
    assert_eq!(inputs.ranks[1].x.len(), 2 * HIDDEN * 4);
    assert_eq!(inputs.ranks[1].topk_weights.as_deref(), Some(&[0.25; 4][..]));
}

#[test]
fn more_ranks_than_tokens_leave_some_empty() {
    let file = InputFile::parse(&bytes(&tensors(), Some("4"))).unwrap();
    let case = file.case(4, None).unwrap();
    assert_eq!(case.tokens, Tokens::Exactly(vec![0, 1, 1, 1]));
    assert!(file.inputs(&case).unwrap().ranks[0].x.is_empty());
}

#[test]
fn a_rank_dimension_decides_the_number_of_ranks() {
    let mut tensors = tensors();
    for (_, _, shape, _) in &mut tensors {
        shape.insert(0, 3);
        shape[1] = 1;
    }
    let file = InputFile::parse(&bytes(&tensors, Some("6"))).unwrap();
    assert_eq!(file.ranks(), Some(3));
    assert_eq!(file.case(3, None).unwrap().tokens, Tokens::Exactly(vec![1, 1, 1]));
    let error = file.case(2, None).unwrap_err().to_string();
    assert!(error.contains("found tensors of 3 ranks; expected 2"), "{error}");
    assert!(error.contains("--ranks 3"), "{error}");
}

#[test]
fn indices_of_32_bits_and_missing_weights_are_taken() {
    let mut tensors = tensors();
    tensors.truncate(2);
    let idx = [0i32, 3, 1, -1, 2, 3].iter().flat_map(|i| i.to_le_bytes()).collect();
    tensors[1] = ("topk_idx", Dtype::I32, vec![TOKENS, 2], idx);
    let file = InputFile::parse(&bytes(&tensors, None)).unwrap();
    let case = file.case(1, Some(4)).unwrap();
    assert!(!case.weights);
    assert_eq!(file.inputs(&case).unwrap().ranks[0].topk_idx, [0, 3, 1, -1, 2, 3]);
}

#[test]
fn the_number_of_experts_comes_from_one_place_or_two_that_agree() {
    let silent = InputFile::parse(&bytes(&tensors(), None)).unwrap();
    assert!(silent.case(1, None).unwrap_err().to_string().contains("--experts"));
    assert_eq!(silent.case(1, Some(8)).unwrap().experts, 8);
    let file = InputFile::parse(&bytes(&tensors(), Some("4"))).unwrap();
    assert_eq!(file.case(1, Some(4)).unwrap().experts, 4);
    assert!(file.case(1, Some(8)).unwrap_err().to_string().contains("num_experts = 4"));
    for bad in ["0", "-4", "many", "99999999999999999999"] {
        let error = InputFile::parse(&bytes(&tensors(), Some(bad))).unwrap_err().to_string();
        assert!(error.contains("num_experts"), "{bad}: {error}");
    }
}

#[test]
fn experts_that_do_not_exist_or_come_twice_are_named_with_tensor_and_row() {
    let with = |values: [i64; 6]| {
        let mut tensors = tensors();
        tensors[1].3 = values.iter().flat_map(|i| i.to_le_bytes()).collect();
        let file = InputFile::parse(&bytes(&tensors, Some("4"))).unwrap();
        file.inputs(&file.case(1, None).unwrap()).unwrap_err().to_string()
    };
    let outside = with([0, 1, 2, 4, 0, 1]);
    let wanted = "k 1: found expert 4; expected below 4 [tensor: topk_idx, row: 1]";
    assert!(outside.contains(wanted), "{outside}");
    let twice = with([0, 1, 2, 2, 0, 1]);
    let wanted = "k 1: found expert 2 twice; expected it once [tensor: topk_idx, row: 1]";
    assert!(twice.contains(wanted), "{twice}");
}

#[test]
fn wrong_tensors_are_named_with_what_was_expected() {
    let message = refusal(|t| drop(t.remove(0)));
    assert!(message.contains("expected a tensor called x"), "{message}");
    let message = refusal(|t| t[2].0 = "topk_weight");
    assert!(message.contains("found tensor \"topk_weight\""), "{message}");
    let message = refusal(|t| t[0] = ("x", Dtype::F64, vec![3, 4], vec![0; 96]));
    assert!(message.contains("x: found type F64; expected BF16, F16 or F32"), "{message}");
    let message = refusal(|t| t[1] = ("topk_idx", Dtype::U32, vec![3, 2], vec![0; 24]));
    assert!(message.contains("topk_idx: found type U32; expected I64 or I32"), "{message}");
    let message = refusal(|t| t[0].2 = vec![TOKENS * HIDDEN]);
    assert!(message.contains("found shape [24]; expected [T, H]"), "{message}");
    let message = refusal(|t| t[0].2 = vec![2, 12]);
    assert!(message.contains("x of shape [2, 12] and topk_idx of shape [3, 2]"), "{message}");
    let message = refusal(|t| t[2].2 = vec![2, 3]);
    assert!(message.contains("topk_weights: found shape [2, 3]"), "{message}");
    let message = refusal(|t| t[0] = ("x", Dtype::F32, vec![0, 8], Vec::new()));
    assert!(message.contains("T at least 1"), "{message}");
    let message = refusal(|t| t[0] = ("x", Dtype::F32, vec![3, 0], Vec::new()));
    assert!(message.contains("3 tokens of 0 elements"), "{message}");
}

#[test]
fn values_that_are_no_numbers_are_found_by_token() {
    let message = refusal(|t| t[0].3[4 * 9..4 * 10].copy_from_slice(&f32::NAN.to_le_bytes()));
    assert!(
        message.contains("h 1: found NaN or infinity") && message.contains("[tensor: x, row: 1]"),
        "{message}"
    );
    let infinite = f32::INFINITY.to_le_bytes();
    let message = refusal(|t| t[2].3[4 * 5..].copy_from_slice(&infinite));
    assert!(
        message.contains("k 1: found inf") && message.contains("[tensor: topk_weights, row: 2]"),
        "{message}"
    );
    // At k = 1 token 1 selects nothing, so its weight is ignored.
    let mut tensors = tensors();
    tensors[2].3[4 * 3..4 * 4].copy_from_slice(&infinite);
    assert!(InputFile::parse(&bytes(&tensors, Some("4"))).is_ok());
}

#[test]
fn a_file_cut_short_anywhere_is_refused() {
    let whole = bytes(&tensors(), Some("4"));
    for length in 0..whole.len() {
        assert!(InputFile::parse(&whole[..length]).is_err(), "{length} bytes");
    }
    let longer = [&whole[..], b"x"].concat();
    assert!(InputFile::parse(&longer).is_err());
}

#[test]
fn hostile_headers_are_refused_and_do_not_panic() {
    let huge = u64::MAX / 8;
    let sizes = format!(r#"{{"x":{{"dtype":"U8","shape":[{huge}],"data_offsets":[0,{huge}]}}}}"#);
    let error = InputFile::parse(&raw(&sizes, b"")).unwrap_err().to_string();
    assert!(error.contains("cut short"), "{error}");
    // Sizes whose sum with the header wraps around to the length of the file.
    let mut header = String::from("{");
    for (i, start) in (0..8u64).map(|i| (i, i * (1 << 61))) {
        let (end, size) =
            if i == 7 { (u64::MAX - 99, (1u64 << 61) - 100) } else { (start + (1 << 61), 1 << 61) };
        let comma = if i == 0 { "" } else { "," };
        header += &format!(
            r#"{comma}"t{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{end}]}}"#
        );
    }
    header.push('}');
    assert!(InputFile::parse(&raw(&header, b"")).is_err());
    for header in ["", "[]", "{", "null", "{\"x\":1}", "{\"__metadata__\":{\"num_experts\":4}}"] {
        assert!(InputFile::parse(&raw(header, b"")).is_err(), "{header}");
    }
    let long = [&(1u64 << 40).to_le_bytes()[..], b"{}"].concat();
    let error = InputFile::parse(&long).unwrap_err().to_string();
    assert!(error.contains("found a header of 1099511627776 bytes"), "{error}");
}

#[test]
fn a_folder_and_a_missing_file_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let error = InputFile::read(folder.path()).unwrap_err().to_string();
    assert!(error.contains("expected a regular file"), "{error}");
    let missing = folder.path().join("none.safetensors");
    let error = InputFile::read(&missing).unwrap_err().to_string();
    assert!(error.contains("none.safetensors") && error.contains("cannot be read"), "{error}");
}

#[test]
fn a_row_of_a_file_with_ranks_is_named_by_rank_and_token_and_the_file_by_its_path() {
    let mut tensors = tensors();
    for (_, _, shape, _) in &mut tensors {
        shape.insert(0, 3);
        shape[1] = 1;
    }
    tensors[1].3[8 * 5..].copy_from_slice(&9_i64.to_le_bytes());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("routing.safetensors");
    std::fs::write(&path, bytes(&tensors, Some("6"))).unwrap();
    let file = InputFile::read(&path).unwrap();
    let error = file.inputs(&file.case(3, None).unwrap()).unwrap_err().to_string();
    let wanted = format!("[file: {}, tensor: topk_idx, row: [2, 0]]", path.display());
    assert!(error.contains("k 1: found expert 9") && error.contains(&wanted), "{error}");
    let error = file.case(2, None).unwrap_err().to_string();
    assert!(error.contains("routing.safetensors"), "{error}");
}

/// The most memory that this process has had so far, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn a_header_is_judged_against_the_size_of_the_file_before_the_file_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.safetensors");
    let refusal = |start: &[u8]| {
        std::fs::write(&path, start).unwrap();
        // The file is sparse: it takes no room on the disk, but would take it in memory.
        std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 30).unwrap();
        let before = peak();
        let error = InputFile::read(&path).unwrap_err().to_string();
        let grown = peak() - before;
        assert!(grown < 256 << 20, "{grown} bytes were read to say: {error}");
        error
    };
    let error = refusal(&(MAX_HEADER as u64 + 1).to_le_bytes());
    assert!(error.contains("found a header of 1048577 bytes"), "{error}");
    let error = refusal(&raw("not json", b""));
    assert!(error.contains("not that of a safetensors file"), "{error}");
    let error = refusal(&bytes(&tensors(), Some("4")));
    assert!(error.contains("found 1073741824 bytes; its header speaks of"), "{error}");
    assert!(error.contains("more bytes than its tensors"), "{error}");
    std::fs::File::create(&path).unwrap().set_len(MAX_BYTES + 1).unwrap();
    let error = InputFile::read(&path).unwrap_err().to_string();
    assert!(error.contains("found 4294967297 bytes; expected at most 4294967296"), "{error}");
}
