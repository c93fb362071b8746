use proptest::prelude::*;

use super::*;

fn tree(text: &str) -> Tree {
    Tree::recorded(text).unwrap()
}

#[test]
fn recorded_files_links_and_repetitions_are_read() {
    let tree = tree(
        "# a comment\n\
         @each i bus = 0 18 | 1 2a\n\
         sys/devices/pci0000:{bus}/nic{i}/name = nic {i}\\nsecond\n\
         sys/class/nic{i} -> ../devices/pci0000:{bus}/nic{i}\n\
         @each k = 9..10\n\
         sys/devices/pci0000:{bus}/nic{i}/q{k} = {i}.{k}\n\
         @end\n\
         @end\n\
         a/text << END\n one\n two\nEND\n\
         a/config x= 10 0:de10 f:ff\n\
         a/secret !denied\n",
    );
    assert_eq!(tree.text("sys/class/nic1/name"), Fact::Known("nic 1\nsecond".into()));
    assert_eq!(tree.resolve("sys/class/nic1"), Fact::Known("sys/devices/pci0000:2a/nic1".into()));
    assert_eq!(tree.list("sys/class/nic0"), ["name", "q9", "q10"]);
    assert_eq!(tree.text("sys/class/nic0/q10"), Fact::Known("0.10".into()));
    assert_eq!(tree.text("a/text"), Fact::Known("one\n two".into()));
    let config = tree.bytes("a/config").get().unwrap();
    assert_eq!((config.len(), config[0], config[1], config[15]), (16, 0xde, 0x10, 0xff));
    assert_eq!(tree.text("a/secret"), Fact::Denied);
    assert_eq!(tree.text("a/other"), Fact::Missing);
    assert_eq!(tree.access("a/secret"), Access::Refused);
}

#[test]
fn changes_replace_and_take_away() {
    let base = "a/x = 1\na/y = 2\nlink -> a\nb/z = 3";
    let tree = Tree::changed(base, "@base base.tree\nlink/x = 7\nb !gone\nnew = 4").unwrap();
    let texts = ["a/x", "a/y", "b/z", "new"].map(|path| tree.text(path).get());
    assert_eq!(texts, [Some("7".into()), Some("2".into()), None, Some("4".into())]);
    assert!(tree.list("b").is_empty() && !tree.has("b"));
    let error = Tree::changed(base, "a/w !gone").unwrap_err().to_string();
    assert!(error.contains("line 1") && error.contains("`a/w`"), "{error}");
    assert!(Tree::recorded("a/x !gone").is_err(), "only changes take away");
}

#[test]
fn an_error_in_a_recorded_tree_names_its_line() {
    for (text, why) in [
        ("a = 1\nb c", "line 2: expected"),
        ("a = 1\na = 2", "line 2: `a` stands there twice"),
        ("../a = 1", "line 1: `../a` is no path"),
        ("@each i = 0..1\n", "line 1: `@each` without `@end`"),
        ("@each i k = 0\n@end", "line 1: 2 names and the row `0`"),
        ("a x= 4 3:ffff", "line 1: `3:ffff` is beyond the end"),
        ("a << END\nb", "line 1: no line `END`"),
    ] {
        let error = Tree::recorded(text).unwrap_err().to_string();
        assert!(error.starts_with(why), "{text:?}: {error}");
    }
}

#[test]
fn links_of_a_folder_stay_within_it() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    fs::create_dir_all(root.join("etc")).unwrap();
    fs::write(root.join("etc/hostname"), "recorded\n").unwrap();
    std::os::unix::fs::symlink("/etc/hostname", root.join("absolute")).unwrap();
    std::os::unix::fs::symlink("../../../../etc/hostname", root.join("etc/upward")).unwrap();
    std::os::unix::fs::symlink("loop", root.join("loop")).unwrap();
    let tree = Tree::open(root).unwrap();
    assert_eq!(tree.text("absolute"), Fact::Known("recorded".into()));
    assert_eq!(tree.text("etc/upward"), Fact::Known("recorded".into()));
    assert_eq!(tree.text("loop"), Fact::Missing);
    assert_eq!(tree.text("../etc/hostname"), Fact::Known("recorded".into()));
    assert_eq!(tree.text("etc"), Fact::Missing);
}

#[test]
fn what_is_no_regular_file_is_not_opened() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    assert_eq!(Tree::open(folder.path()).unwrap().bytes("pipe"), Fact::Missing);
}

#[test]
fn the_system_is_read_as_it_is() {
    let tree = Tree::open(Path::new("/")).unwrap();
    assert!(tree.is_system());
    assert!(tree.text("proc/self/status").get().unwrap().contains("Pid:"));
    assert_eq!(tree.text("no/such/file"), Fact::Missing);
}

#[test]
fn names_are_in_order_of_their_numbers() {
    let mut names = ["mlx5_10", "mlx5_9", "efa", "mlx5_0", "rdmap9s0", "rdmap85s0"];
    names.sort_by(|a, b| natural(a, b));
    assert_eq!(names, ["efa", "mlx5_0", "mlx5_9", "mlx5_10", "rdmap9s0", "rdmap85s0"]);
}

proptest! {
    #[test]
    fn no_text_of_a_recorded_tree_panics(text in "(@each i = [0-9.|]{0,4}\n|@end\n|[a-c/.]{1,4} (=|->|x=|<<) [a-c0-9:./{}\\\\]{0,6}\n|\\PC{0,8}\n){0,12}") {
        if let Ok(tree) = Tree::recorded(&text) {
            for path in ["a", "b/a", "c", "a/b/c", ""] {
                let _ = (tree.text(path), tree.list(path), tree.resolve(path));
            }
        }
    }
}

#[test]
fn nested_repetitions_that_would_not_end_are_refused() {
    let text = "@each a = 0..65535\n@each b = 0..65535\n# x\n@end\n@end\n";
    let error = Tree::recorded(text).unwrap_err();
    assert!(error.to_string().contains("more than"), "{error}");
}

#[test]
fn comments_and_removals_in_repetitions_count_too() {
    let comments = "# x\n".repeat(1000);
    let text = format!("@each a = 0..65535\n{comments}@end\n");
    let error = Tree::recorded(&text).unwrap_err().to_string();
    assert!(error.contains("more than 524288 lines"), "{error}");
    let base = "@each i = 0..9999\nf/{i} =\n@end\n";
    let text = "@each i = 0..9999\nf/{i} !gone\nf/{i} =\n@end\n";
    let error = Tree::changed(base, text).unwrap_err().to_string();
    assert!(error.contains("more than 524288 lines"), "{error}");
}

#[test]
fn variables_that_multiply_are_refused_before_they_fill_the_memory() {
    let mut text = format!("@each a = {}\n", "x".repeat(10_000));
    for (name, of) in [("b", "a"), ("c", "b"), ("d", "c")] {
        text += &format!("@each {name} = {}\n", format!("{{{of}}}").repeat(10_000));
    }
    text += "f = {d}\n@end\n@end\n@end\n@end\n";
    let error = Tree::recorded(&text).unwrap_err().to_string();
    assert!(error.contains("variables make more than"), "{error}");
}

#[test]
fn a_tree_may_lie_on_one_that_lies_on_another_but_not_on_itself() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("a.tree", "x = 1\ny = 1\nz = 1\n");
    write("b.tree", "@base a.tree\ny = 2\nz = 2\n");
    write("c.tree", "@base b.tree\nz = 3\n");
    write("loop.tree", "@base loop.tree\n");
    let tree = Tree::open(&folder.path().join("c.tree")).unwrap();
    let texts = ["x", "y", "z"].map(|path| tree.text(path).get().unwrap());
    assert_eq!(texts, ["1", "2", "3"]);
    let error = Tree::open(&folder.path().join("loop.tree")).unwrap_err().to_string();
    assert!(error.contains("on top of each other"), "{error}");
}

#[test]
fn what_never_ends_or_waits_for_ever_is_no_recorded_tree() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    let kind = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, rustix::fs::Mode::from_raw_mode(0o600), 0)
        .unwrap();
    let on_top = folder.path().join("on-top.tree");
    fs::write(&on_top, "@base pipe\n").unwrap();
    let large = folder.path().join("large.tree");
    fs::File::create(&large).unwrap().set_len(1 << 40).unwrap();
    for (path, why) in [
        (pipe.as_path(), "found a FIFO, expected"),
        (on_top.as_path(), "found a FIFO, expected"),
        (Path::new("/dev/zero"), "found a character device, expected"),
        (large.as_path(), "expected at most"),
    ] {
        let error = Tree::open(path).unwrap_err().to_string();
        assert!(error.contains(why), "{path:?}: {error}");
    }
}

#[test]
fn the_root_of_another_process_is_not_taken_for_this_one_s() {
    // The text of this link is `/`, whatever the root is.
    let tree = Tree::open(Path::new("/proc/self/root")).unwrap();
    assert!(!tree.is_system());
    assert!(tree.has("proc/self/status"));
}
