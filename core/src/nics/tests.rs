use super::*;
use crate::abi::TY_ERROR_MESSAGE;

fn nics(names: &[&str]) -> Nics {
    Nics { names: names.iter().map(|nic| (*nic).to_owned()).collect(), any_rails: false }
}

fn listed(names: &[&str]) -> Vec<ListedNic> {
    names.iter().map(|name| ListedNic { name: (*name).to_owned(), fault: None }).collect()
}

fn search(listed: &[ListedNic]) -> NicSearch<'_> {
    let fix = "give the process its device and a link, or name others in `rails`";
    NicSearch { transport: "provider verbs", listed, most: 16, own_names: false, fix }
}

#[test]
fn the_nics_of_the_topology_are_found_by_name_in_the_order_of_its_choice() {
    let listed = listed(&["rdmap8s0-rdm", "rdmap85s0-rdm", "mlx5_1", "mlx5_10"]);
    let chosen = |names: &[&str]| nics(names).choose(&search(&listed)).unwrap();
    assert_eq!(chosen(&["rdmap85s0", "rdmap8s0"]), [1, 0]);
    assert_eq!(chosen(&["mlx5_10"]), [3]);
    assert!(chosen(&[]).is_empty());
}

#[test]
fn a_transport_gets_as_many_as_it_uses_and_the_others_may_be_faulty() {
    let listed = listed(&["mlx5_0", "mlx5_1"]);
    let one = NicSearch { most: 1, ..search(&listed) };
    assert_eq!(nics(&["mlx5_1", "mlx5_0"]).choose(&one).unwrap(), [1]);
    assert_eq!(nics(&["mlx5_1", "mlx5_7"]).choose(&one).unwrap(), [1]);
}

#[test]
fn a_nic_that_is_as_near_stands_in_unless_the_transport_uses_both() {
    let listed = listed(&["mlx5_0", "mlx5_1"]);
    let chosen = nics(&["mlx5_7", "mlx5_1"]);
    assert_eq!(chosen.choose(&NicSearch { most: 1, ..search(&listed) }).unwrap(), [1]);
    assert!(chosen.choose(&NicSearch { most: 2, ..search(&listed) }).is_err());
    let none = nics(&["mlx5_7", "mlx5_8"]).choose(&NicSearch { most: 1, ..search(&listed) });
    let text = none.unwrap_err().to_string();
    assert!(text.contains("mlx5_7 (not listed), mlx5_8 (not listed)"), "{text}");
}

#[test]
fn a_nic_is_used_by_its_port_that_can_be() {
    let mut listed = listed(&["mlx5_0", "mlx5_0"]);
    listed[0].fault = Some("port 1 is not active".to_owned());
    assert_eq!(nics(&["mlx5_0"]).choose(&search(&listed)).unwrap(), [1]);
}

#[test]
fn a_nic_that_cannot_be_used_is_refused_with_the_reason_and_those_that_can() {
    let mut listed = listed(&["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_2"]);
    listed[1].fault = Some("port 1 is not active".to_owned());
    for names in [&["mlx5_1", "mlx5_3"][..], &["mlx5_1", "mlx5_3", "mlx5_0"]] {
        let error = nics(names).choose(&search(&listed)).unwrap_err();
        assert_eq!((error.kind(), error.operation()), (ErrorKind::Unavailable, "choose NICs"));
        assert_eq!(
            error.message(),
            "provider verbs cannot use mlx5_1 (port 1 is not active), mlx5_3 (not listed), which the topology chose \
             for this rank; it can use mlx5_0, mlx5_2"
        );
        let fix = error.fix().unwrap();
        assert!(fix.contains("name others in `rails`; or set rails = \"any\""), "{fix}");
    }
}

#[test]
fn where_rails_do_not_matter_the_nics_of_the_topology_that_can_be_used_are_and_else_any() {
    let listed = listed(&["mlx5_0", "mlx5_1"]);
    let free = |names: &[&str], most| {
        let nics = Nics { any_rails: true, ..nics(names) };
        nics.choose(&NicSearch { most, ..search(&listed) }).unwrap()
    };
    assert_eq!(free(&["mlx5_7", "mlx5_1"], 1), [1]);
    assert_eq!(free(&["mlx5_7", "mlx5_1"], 16), [1]);
    assert!(free(&["mlx5_7"], 16).is_empty());
    // The transport's name for mlx5_7 is not known.
    let named = NicSearch { own_names: true, ..search(&listed) };
    assert_eq!(nics(&["mlx5_7", "mlx5_0"]).choose(&named).unwrap(), [0]);
}

#[test]
fn an_error_about_many_nics_leaves_room_for_the_way_out() {
    let names: Vec<String> = (0..32).map(|i| format!("rocep249s{i}f1")).collect();
    let listed = listed(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let chosen: Vec<String> = (0..8).map(|i| format!("rocep250s{i}f1")).collect();
    let chosen = Nics { names: chosen, any_rails: false };
    let text = chosen.choose(&search(&listed)).unwrap_err().to_string();
    assert!(text.len() < TY_ERROR_MESSAGE && text.ends_with("reach each other"), "{text}");
    assert!(text.contains(" more, which the topology chose"), "{text}");
}
