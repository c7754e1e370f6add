/* sources d58c52fdc4bad294728896b3a88ce991f8c08fecc4af11cba08a6230f29ad1ca */
var S,at,pr,G,Ee,he,st,ue,it,qe,Ne,dr,ae=Symbol.for("pv"),me={},_e=[],ur=/^m(i|n|o|s|text|space)$/,Oe=Array.isArray,Re=_e.slice,Y=Object.assign;function X(t){t&&t.parentNode&&t.remove()}function Le(t,e,r){var n,a,o,s={},i=arguments.length;for(o in e)o=="key"?n=e[o]:o=="ref"&&typeof t!="function"?a=e[o]:s[o]=e[o];return i>2&&(s.children=i>3?Re.call(arguments,2):r),ne(t,s,n,a,null)}function ne(t,e,r,n,a){var o={type:t,props:e,key:r,ref:n,__k:null,__:null,__b:0,__e:null,__c:null,constructor:ae,__v:a||++at,__i:-1,__u:0};return!a&&S.vnode&&S.vnode(o),o}function xe(t){return t.children}function oe(t,e){this.props=t,this.context=e,this.__g=0}function K(t,e){if(e==null)return t.__&&K(t.__,t.__i+1);for(var r;e<t.__k.length;e++)if((r=t.__k[e])&&r.__e)return r.__e;return typeof t.type!="function"||t.props.__P?null:K(t)}function fr(t){var e,r=t.__v,n=r.__e,a=[],o=[],s=t.__P;s&&((e=Y({constructor:ae},r)).__v=r.__v+1,S.vnode&&S.vnode(e),je(s,e,r,t.__n,s.namespaceURI,32&r.__u?[n]:null,a,n||K(r),32&r.__u,o),e.__v=r.__v,e.__.__k[e.__i]=e,ft(a,e,o),r.__=r.__e=null,e.__e!=n&&lt(e))}function lt(t){if((t=t.__)&&t.__c&&!t.props.__P)return t.__e=null,t.__k.some(function(e){return e&&(t.__e=e.__e)}),lt(t)}function nt(t){(8&t.__g||(t.__g|=8,G.push(t),he++))&&Ee==S.debounceRendering||((Ee=S.debounceRendering)||queueMicrotask)(ct)}function ct(){try{for(var t,e=1;G.length;)G.length>e&&G.sort(st),t=G.shift(),e=G.length,8&t.__g&&fr(t)}finally{(he=G.length)&&(Ee||queueMicrotask)(ct)}}function pt(t,e,r,n,a,o,s,i,c,h,p){var f,u,l,_,m,d,x=n.__k||_e,g=e.length;for(c=hr(r,e,x,c,g),f=0;f<g;f++)(l=r.__k[f])!=null&&(u=~l.__i&&x[l.__i]||me,l.__i=f,d=je(t,l,u,a,o,s,i,c,h,p),_=l.__e,(u.ref!=l.ref||8&u.__u)&&(u.ref&&Ue(u.ref,null,l,u),l.ref&&p.push(l.ref,l.__c||_,l)),m=m||_,4&l.__u?(c=dt(l,c,t,!u.__v),u.__e&&(u.__e=null)):typeof l.type=="function"&&d!==void 0?c=d:_&&(c=_.nextSibling),l.__u&=-21);return r.__e=m,c}function hr(t,e,r,n,a){var o,s,i,c,h,p,f,u,l,_=r.length,m=_,d=0,x=0,g=t.__k=Array(a);for(o=0;o<a;o++)(s=e[o])!=null&&typeof s!="boolean"&&typeof s!="function"?(typeof s!="object"||s.constructor===String?s=g[o]=ne(null,s):Oe(s)?s=g[o]=ne(xe,{children:s}):s.constructor===ae&&s.__b?s=g[o]=ne(s.type,s.props,s.key,s.ref,s.__v):g[o]=s,c=o+d,s.__=t,s.__b=t.__b+1,i=null,~(h=s.__i=mr(s,r,c,m))&&(m--,(i=r[h])&&(i.__u|=2)),i&&i.__v?(s.__u|=16,h==c-1?d--:h==c+1?d++:h!=c&&(h>c?d--:d++,x=1)):(~h||(a>_?d--:a<_&&d++),typeof s.type!="function"&&(s.__u|=4))):g[o]=null;if(x){for(p=[],f=[],o=0;o<a;o++)if((s=g[o])&&16&s.__u){for(d=0,u=p.length;d<u;)p[l=d+u>>1]<s.__i?d=l+1:u=l;p[d]=s.__i,f[o]=d+1}for(d=p.length;o--;)f[o]&&(f[o]==d?d--:g[o].__u|=4)}if(m)for(o=0;o<_;o++)!(i=r[o])||2&i.__u||(i.__e==n&&(n=K(i)),He(i,i));return n}function dt(t,e,r,n){var a,o,s,i;if(typeof t.type=="function"){if(t.props.__P)return e;if(a=t.__k)for(o=0;o<a.length;o++)a[o]&&(a[o].__=t,e=dt(a[o],e,r,!1));return e}for(e&&!e.parentNode&&(e=K(t))&&!e.parentNode&&(e=null),s=t.__e,i=e;i&&i.nodeType==8;)i=i.nextSibling;for(s!=i&&(!n&&r.moveBefore&&s.parentNode?r.moveBefore(s,e):r.insertBefore(s,e||null)),e=s;(e=e&&e.nextSibling)&&e.nodeType==8&&!e.data.startsWith("$s"););return e}function mr(t,e,r,n){var a,o=t.key,s=t.type,i=e[r],c=i&&!(2&i.__u);if(i===null&&o==null||c&&o==i.key&&s==i.type)return r;if(n>(c?1:0)){for(a=r-1;a>=0;a--)if((i=e[a])&&!(2&i.__u)&&o==i.key&&s==i.type)return a;for(a=r+1;a<e.length;a++)if((i=e[a])&&!(2&i.__u)&&o==i.key&&s==i.type)return a}return-1}function ot(t,e,r){r==null&&(r=""),e[0]=="-"?t.setProperty(e,r):t[e]=r}function de(t,e,r,n,a){var o,s;if(e=="style")if(typeof r=="string")t.style.cssText=r;else{if(typeof n=="string"&&(t.style.cssText=n=""),n)for(e in n)r&&e in r||ot(t.style,e);if(r)for(e in r)n&&r[e]==n[e]||ot(t.style,e,r[e])}else if(e[0]=="o"&&e[1]=="n")typeof r!="function"&&(r=null),typeof n!="function"&&(n=null),(t.__e||(t.__e={}))[e]=r,r&&n||(s=Ne[e]||(Ne[e]=_r(e)),(t.__a||(t.__a={}))[e]=qe,o=e!=(e=e.replace(it,"$1")),(e=e.slice(2))[0]<"a"&&(e=e.toLowerCase()),r?t.addEventListener(e,s,o):t.removeEventListener(e,s,o));else{if(a=="http://www.w3.org/2000/svg")e=e.replace(/xlink(H|:h)/,"h").replace(/sName$/,"s");else if(e!="width"&&e!="height"&&e!="href"&&e!="list"&&e!="form"&&e!="tabIndex"&&e!="download"&&e!="rowSpan"&&e!="colSpan"&&e!="role"&&e!="popover"&&e in t)try{return void(t[e]=r??"")}catch{}if(typeof r=="function")return;r==null||r===!1&&e[4]!="-"?t.removeAttribute(e):t.setAttribute(e,e=="popover"&&r==1?"":r)}}function _r(t){return function(e){var r=this.__e;if(r){if(r=r[t],e[ue]==null)e[ue]=qe++;else if(e[ue]<this.__a[t])return;return r(S.event?S.event(e):e)}}}function je(t,e,r,n,a,o,s,i,c,h){var p,f,u,l,_,m,d,x,g,w,k,v,y,M,P,H,O,$,C=e.type;if(e.constructor!==ae)return null;128&r.__u&&(c=32&r.__u,p=r.__c.__z)&&(e.__u|=c,f=o=[],p.nodeType==8?i=fe(p,o):o.push(p),i=o[0]||i),(p=S.__b)&&p(e);e:if(typeof C=="function"){u=s.length;try{if(x=e.props,g=(p=C.prototype)&&p.render,w=(p=C.contextType)&&n[p.__c],k=p?w?w.props.value:p.__:n,(l=r.__c)?(e.__c=l,2&l.__g&&(l.__g|=1)):(g?e.__c=l=new C(x,k):(e.__c=l=new oe(x,k),l.constructor=C,l.render=gr),w&&w.sub(l),l.state||(l.state={}),l.__n=n,l.__g|=8,l.__h=[],l.__k=[]),g&&(l.__s||(l.__s=l.state),C.getDerivedStateFromProps&&(l.__s==l.state&&(l.__s=Y({},l.__s)),Y(l.__s,C.getDerivedStateFromProps(x,l.__s)))),_=l.props,m=l.state,l.__v=e,r.__c){if(x!==_&&g&&!C.getDerivedStateFromProps&&l.componentWillReceiveProps&&l.componentWillReceiveProps(x,k),e.__v==r.__v&&!(8&l.__g)||!(4&l.__g)&&l.shouldComponentUpdate&&l.shouldComponentUpdate(x,l.__s,k)===!1){e.__v!=r.__v&&(l.props=x,l.state=l.__s,l.__g&=-9),e.__e=r.__e,e.__k=r.__k,e.__k.some(function(z){z&&(z.__=e)}),_e.push.apply(l.__h,l.__k),l.__k=[],l.__h.length&&s.push(l),i=K(r);break e}l.componentWillUpdate&&l.componentWillUpdate(x,l.__s,k),g&&l.componentDidUpdate&&l.__h.push(function(){l.componentDidUpdate(_,m,d)})}else g&&!C.getDerivedStateFromProps&&l.componentWillMount&&l.componentWillMount(),g&&l.componentDidMount&&l.__h.push(l.componentDidMount);l.context=k,l.props=x,l.__P=t,l.__g&=-5,v=S.__r,y=g?25:0;do l.__g&=-9,v&&v(e),p=l.render(l.props,l.state=l.__s,l.context);while(8&l.__g&&++y<25);g&&(_e.push.apply(l.__h,l.__k),l.__k=[]),l.state=l.__s,l.getChildContext&&(n=Y({},n,l.getChildContext())),g&&r.__c&&l.getSnapshotBeforeUpdate&&(d=l.getSnapshotBeforeUpdate(_,m)),M=p&&p.type===xe&&p.key==null?p.props.children:p,x.__P&&(p=i,a=(t=x.__P).namespaceURI,c=o=null,r.props&&r.props.__P!=t&&(r.__k.some(function(z){z&&He(z,z)}),r.__k=null),i=r.__k?K(r,0):null),i=pt(t,Oe(M)?M:[M],e,r,n,a,o,s,i,c,h),x.__P&&(e.__e=null,i=p),e.__u&=-161,f&&f.some(X),l.__h.length&&s.push(l),1&l.__g&&(l.__g&=-4)}catch(z){if(s.length=u,e.__v=null,c||o)if(z&&z.then){if(e.__u|=128|c,o){for(~(O=o.indexOf(i||void 0))||(O=o.length);($=o[O-1])&&$.nodeType==8;)O--;for(;O<o.length;O++)if($=o[O])if(o[O]=null,P){if($==H)break}else{if($.nodeType!=8)break;$.data.startsWith("$s")&&(H=fe(P=$))}}if(!P){for(;i&&i.nodeType==8&&i.nextSibling;)i=i.nextSibling;P=i}(p=fe(P=e.__c.__z||(e.__c.__z=P)))?(e.__e=P,i=p):e.__e=i,i=i&&i.nextSibling}else o&&o.some(X);else e.__e=r.__e;e.__k||(e.__k=r.__k||[]),z&&z.then||ut(e),S.__e(z,e,r)}}else i=e.__e=xr(r.__e,e,r,n,a,o,s,c,h,t);return(p=S.diffed)&&p(e),i}function fe(t,e){if(t&&t.nodeType==8&&t.data.startsWith("$s"))for(var r=1;t=t.nextSibling;){if(t.nodeType==8){if(t.data.startsWith("$s"))r++;else if(t.data.startsWith("/$s")&&!--r)return t}e&&e.push(t)}}function ut(t){t&&(t.__c&&(t.__c.__g|=4),t.__k&&t.__k.some(ut))}function ft(t,e,r){for(var n=0;n<r.length;)Ue(r[n++],r[n++],r[n++]);S.__c&&S.__c(e,t),t.some(function(a){try{t=a.__h,a.__h=[],t.some(function(o){o.call(a)})}catch(o){S.__e(o,a.__v)}})}function xr(t,e,r,n,a,o,s,i,c,h){var p,f,u,l,_,m,d,x,g=r.props||me,w=e.props,k=e.type;if(k=="svg"?a="http://www.w3.org/2000/svg":k=="math"?a="http://www.w3.org/1998/Math/MathML":a||(a="http://www.w3.org/1999/xhtml"),o){for(p=0;p<o.length;p++)if((_=o[p])&&(k?_.localName==k:_.nodeType==3)){t=_,o[p]=null;break}}if(!t){if(x=h.ownerDocument||document,!k)return x.createTextNode(w);t=x.createElementNS(a,k,w.is?w:h),i&&(S.__m&&S.__m(e,o),i=!1),o=null}if(k){if(h=k=="template"&&t.content||t,o=k=="textarea"&&w.defaultValue!=null?null:o&&Re.call(h.childNodes),!i&&o)for(g={},p=0;p<t.attributes.length;p++)g[(_=t.attributes[p]).name]=_.value;for(p in g)_=g[p],p=="dangerouslySetInnerHTML"?u=_:p=="children"||p in w||p=="value"&&"defaultValue"in w||p=="checked"&&"defaultChecked"in w||de(t,p,null,_,a);for(p in w)_=w[p],p=="children"?l=_:p=="dangerouslySetInnerHTML"?f=_:p=="value"?m=_:p=="checked"?d=_:i&&typeof _!="function"||g[p]===_||de(t,p,_,g[p],a);f?(i||u&&(f.__html==u.__html||f.__html==t.innerHTML)||(t.innerHTML=f.__html),e.__k=[]):(u&&(t.textContent=""),(k=="foreignObject"||a=="http://www.w3.org/1998/Math/MathML"&&ur.test(k))&&(a="http://www.w3.org/1999/xhtml"),pt(h,Oe(l)?l:[l],e,r,n,a,o,s,o?o[0]:r.__k&&K(r,0),i,c),o&&o.some(X)),i&&k!="textarea"||(p="value",k=="progress"&&m==null?t.removeAttribute(p):m==null||m===t[p]&&(k!="progress"||m)||de(t,p,m,g[p],a),p="checked",d!=null&&d!=t[p]&&de(t,p,d,g[p],a))}else g===w||i&&t.data==w||(t.data=w);return t}function Ue(t,e,r,n){try{typeof t=="function"?e?e.__x=t(e)||1:n&&(n=n.__c||n.__e)&&(e=n.__x)&&(n.__x=null,typeof e=="function"?e():t(null)):t.current=e}catch(a){S.__e(a,r)}}function He(t,e,r){var n,a,o,s;if(S.unmount&&S.unmount(t),!(n=t.ref)||n.current&&n.current!=t.__e||Ue(n,null,e,t),n=t.__c){if(n.componentWillUnmount)try{n.componentWillUnmount()}catch(i){S.__e(i,e)}n.__P=n.__n=null}if(n=t.__k)for(s=0;s<n.length;s++)n[s]&&He(n[s],e,typeof t.type!="function"||r&&!t.props.__P);!r&&(n=t.__c)&&(n=n.__z)&&(a=fe(n,o=[]))&&(n==t.__e&&o.some(X),X(a),X(n)),r||X(t.__e),t.__e=t.__c=t.__=null}function gr(t,e,r){return this.constructor(t,r)}function Ie(t,e){var r,n,a,o;S.__&&S.__(t,e),e.nodeType==9&&(e=e.documentElement),n=(r=t&&32&t.__u)?null:e.__k,e.__k=ne(xe,{children:[t]}),a=[],o=[],je(e,e.__k,n||me,me,e.namespaceURI,n?null:e.firstChild?Re.call(e.childNodes):null,a,n?n.__e:e.firstChild,r,o),ft(a,e.__k,o),e.__k.props.children=null}S={__e:function(t,e,r,n){for(var a,o,s;e=e.__;)if((a=e.__c)&&!(1&a.__g)){a.__g|=4;try{if((s=(o=a.constructor)&&o.getDerivedStateFromError)&&a.setState(o.getDerivedStateFromError(t)),a.componentDidCatch&&(a.componentDidCatch(t,n||{}),s=1),s&&8&a.__g)return void(a.__g|=2)}catch(i){t=i}}throw he=0,t}},at=0,pr=function(t){return t!=null&&t.constructor===ae},oe.prototype.setState=function(t,e){var r=this.__s;r&&r!=this.state||(r=this.__s=Y({},this.state)),typeof t=="function"&&(t=t(Y({},r),this.props)),t&&(Y(r,t),this.__v&&(e&&this.__k.push(e),nt(this)))},oe.prototype.forceUpdate=function(t){this.__v&&(this.__g|=4,t&&this.__h.push(t),nt(this))},oe.prototype.render=xe,G=[],he=0,st=function(t,e){return t.__v.__b-e.__v.__b},ue=Symbol(),it=/(PointerCapture)$|Capture$/i,qe=0,Ne={},dr=0;var mt=function(t,e,r,n){var a;e[0]=0;for(var o=1;o<e.length;o++){var s=e[o++],i=e[o]?(e[0]|=s?1:2,r[e[o++]]):e[++o];s===3?n[0]=i:s===4?n[1]=Object.assign(n[1]||{},i):s===5?(n[1]=n[1]||{})[e[++o]]=i:s===6?n[1][e[++o]]+=i+"":s?(a=t.apply(i,mt(t,i,r,["",null])),n.push(a),i[0]?e[0]|=2:(e[o-2]=0,e[o]=a)):n.push(i)}return n},ht=new Map;function _t(t){var e=ht.get(this);return e||(e=new Map,ht.set(this,e)),(e=mt(this,e.get(t)||(e.set(t,e=(function(r){for(var n,a,o=1,s="",i="",c=[0],h=function(u){o===1&&(u||(s=s.replace(/^\s*\n\s*|\s*\n\s*$/g,"")))?c.push(0,u,s):o===3&&(u||s)?(c.push(3,u,s),o=2):o===2&&s==="..."&&u?c.push(4,u,0):o===2&&s&&!u?c.push(5,0,!0,s):o>=5&&((s||!u&&o===5)&&(c.push(o,0,s,a),o=6),u&&(c.push(o,u,0,a),o=6)),s=""},p=0;p<r.length;p++){p&&(o===1&&h(),h(p));for(var f=0;f<r[p].length;f++)n=r[p][f],o===1?n==="<"?(h(),c=[c],o=3):s+=n:o===4?s==="--"&&n===">"?(o=1,s=""):s=n+s[0]:i?n===i?i="":s+=n:n==='"'||n==="'"?i=n:n===">"?(h(),o=1):o&&(n==="="?(o=5,a=s,s=""):n==="/"&&(o<5||r[p][f+1]===">")?(h(),o===3&&(c=c[0]),o=c,(c=c[0]).push(2,0,o),o=0):n===" "||n==="	"||n===`
`||n==="\r"?(h(),o=2):s+=n),o===3&&s==="!--"&&(o=4,c=c[0])}return h(),c})(t)),e),arguments,[])).length>1?e:e[0]}var b=_t.bind(Le);var ie,N,De,xt,Fe=Object.is,le=0,Ct=[],Be=[],E=S,gt=E.__b,bt=E.__r,$t=E.diffed,vt=E.__c,wt=E.unmount,yt=E.__;function Ve(t,e){E.__h&&E.__h(N,t,le||e),le=0;var r=N.__H||(N.__H={__:[],__h:[]});return t>=r.__.length&&r.__.push({}),r.__[t]}function U(t){return le=1,br(Pt,t)}function br(t,e,r){var n=Ve(ie++,2);if(n.t=t,!n.__c&&(n.__=[r?r(e):Pt(void 0,e),function(o){var s=(n.__N||n.__)[0],i=n.t(s,o);Fe(s,i)||(n.__N=[i,n.__[1]],n.__c.setState({}))}],n.__c=N,!N.__f)){N.__f=!0;var a=N.shouldComponentUpdate;N.shouldComponentUpdate=function(o,s,i){var c=this.__H;if(!c)return!0;var h=!1,p=this.props!=o;if(c.__.some(function(u){u.__N&&(h=!0,Fe(u.__[0],u.__N[0])||(p=!0))}),a){var f=a.call(this,o,s,i);return h?f||p:f}return!h||p}}return n.__}function L(t,e){var r=Ve(ie++,3);!E.__s&&St(r.__H,e)&&(r.__P=!0,r.__=t,r.u=e,N.__H.__h.push(r))}function q(t){return le=5,B(function(){return{current:t}},[])}function B(t,e){var r=Ve(ie++,7);return St(r.__H,e)&&(r.__=t(),r.__H=e),r.__}function At(t,e){return le=8,B(function(){return t},e)}function $r(){var t;do{for(;t=Be.shift();)try{se(t)}catch(r){E.__e(r,{__:(t=t.__P)&&t.__v})}for(;t=Ct.shift();){var e=t.__H;if(t.__P&&e)try{e.__h.some(se),e.__h.some(We),e.__h=[]}catch(r){e.__h=[],E.__e(r,t.__v)}}}while(Be.length)}E.__b=function(t){N=null,gt&&gt(t)},E.__=function(t,e){t&&e.__k&&e.__k.__m&&(t.__m=e.__k.__m),yt&&yt(t,e)},E.__r=function(t){bt&&bt(t),ie=0;var e=(N=t.__c).__H;e&&(De==N?N.__h=[]:(e.__h.some(se),e.__h.some(We),ie=0),e.__h=[],e.__.some(function(r){r.__N&&(r.__=r.__N),r.u=r.__N=void 0})),De=N},E.diffed=function(t){$t&&$t(t);var e=t.__c;e&&e.__H&&(e.__H.__h.length&&Mt(Ct.push(e)),e.__H.__.some(function(r){r.u&&(r.__H=r.u)})),De=N=null},E.__c=function(t,e){e.some(function(r){try{r.__h.some(se),r.__h=r.__h.filter(function(n){return!n.__||We(n)})}catch(n){r.__h=[function(){throw n}]}}),vt&&vt(t,e)},E.unmount=function(t){wt&&wt(t);var e,r,n=t.__c;n&&n.__H&&(n.__H.__.some(function(a){try{if(a.__P&&a.__c){if(r===void 0){for(r=t.__;r&&(!r.__c||!r.__c.__P);)r=r.__;r=r&&r.__c}a.__P=r,Mt(Be.push(a))}else se(a)}catch(o){e=o}}),n.__H=void 0,e&&E.__e(e,n.__v))};var kt=typeof requestAnimationFrame=="function";function vr(t){var e,r=function(){clearTimeout(n),kt&&cancelAnimationFrame(e),setTimeout(t)},n=setTimeout(r,35);kt&&(e=requestAnimationFrame(r))}function Mt(t){t!=1&&xt==E.requestAnimationFrame||((xt=E.requestAnimationFrame)||vr)($r)}function se(t){var e=N,r=t.__c;typeof r=="function"&&(t.__c=void 0,r()),N=e}function We(t){var e=N;t.__c=t.__(),N=e}function St(t,e){return!t||t.length!=e.length||e.some(function(r,n){return!Fe(r,t[n])})}function Pt(t,e){return typeof e=="function"?e(t):e}var wr={light:{positive:[[250,249,246],[196,221,240],[104,168,214],[23,102,166],[5,48,97]],negative:[[250,249,246],[253,219,179],[244,164,86],[201,98,11],[115,46,4]]},dark:{positive:[[22,24,29],[20,58,92],[32,106,164],[92,172,231],[205,233,255]],negative:[[22,24,29],[84,45,12],[156,84,17],[235,144,60],[255,225,189]]}};function zt(t){let e=new Uint8ClampedArray(1533);for(let r=0;r<511;r++){let n=wr[t][r<255?"negative":"positive"],a=Math.abs(r-255)/255*(n.length-1),o=Math.min(Math.floor(a),n.length-2);for(let s=0;s<3;s++){let[i,c]=[n[o][s],n[o+1][s]];e[3*r+s]=i+(c-i)*(a-o)}}return e}var Ge={light:zt("light"),dark:zt("dark")},Ke=()=>matchMedia("(prefers-color-scheme: dark)").matches?"dark":"light",ge=(t,e)=>255+Math.round(255*Math.sign(t)*Math.sqrt(Math.min(1,Math.abs(t)/e))),te=t=>Ge[t];function Tt(t,e,r){let n=3*ge(t,e),[a,o,s]=Ge[r].subarray(n,n+3);return`rgb(${a} ${o} ${s})`}function Et(t,e,r){let n=3*ge(t,e),[a,o,s]=Ge[r].subarray(n,n+3);return .299*a+.587*o+.114*s>140?"#14161a":"#ffffff"}var Je=new Float32Array(65536);for(let t=0;t<Je.length;t++){let e=t>>10&31,r=t&1023,n=e===0?r*2**-24:(1+r/1024)*2**(e-15);Je[t]=t>>15?-n:n}var be=t=>t*(t+1)/2;function Nt(t,e=null){let r=new DataView(t);if(r.getUint32(0)!==1146375473)throw new Error("These are no attention maps.");let n=r.getUint32(4,!0),a=r.getUint32(8,!0),o=r.getUint32(12,!0),s=be(a),i=16,c=null;if(o===2){c=new Float32Array(n),a&&c.set(e.lam.subarray(0,a));for(let p=a;p<n;p++,i+=4)c[p]=r.getFloat32(i,!0)}let h=["first","second"].slice(0,o).map(p=>{let f=new Float32Array(be(n));a&&f.set(e[p].subarray(0,s));for(let u=s;u<f.length;u++,i+=2)f[u]=Je[r.getUint16(i,!0)];return f});return{length:n,lam:c,first:h[0],second:h[1]??null}}function qt(t,e=null){if(!t.second)return t.first;let r=new Float32Array(t.first.length);for(let n=0,a=0;n<t.length;n++){let o=e??t.lam[n];for(let s=0;s<=n;s++,a++)r[a]=t.first[a]-o*t.second[a]}return r}var J=(t,e)=>t.subarray(be(e),be(e+1));function Ot(...t){let e=0;for(let r of t)for(let n=0;n<r.length;n++){let a=Math.abs(r[n]);a>e&&(e=a)}return e||1}function $e(t){let e=atob(t),r=new Uint8Array(e.length);for(let n=0;n<e.length;n++)r[n]=e.charCodeAt(n);return r.buffer}var Rt={"\n":"⏎","	":"⇥","\r":"␍"},ce=t=>[...t].map(e=>{if(e in Rt)return Rt[e];let r=e.codePointAt(0);return r<32?String.fromCodePoint(9216+r):r===127?"␡":/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}]/u.test(e)?`⟨${r.toString(16).toUpperCase()}⟩`:e}).join("");function j(t,e=14){let r=ce(t).replace(/^ +/,a=>"␣".repeat(Math.min(3,a.length))),n=[...r];return n.length>e?`${n.slice(0,e-1).join("")}…`:r||"∅"}var R=(t,e=0)=>`${(100*t).toFixed(e)} %`;function A(t,e=3){return t==null||Number.isNaN(t)?"–":(Math.abs(t)>=.001||t===0?t.toFixed(e):t.toExponential(1)).replace("-","−")}var D=(t,e)=>`${t}.${e}`;function Lt(t,e,r,n){let a=[];for(let s=1;s<r.length;s++){let i=J(e,s),c=0;for(let h=1;h<i.length;h++)Math.abs(i[h])>Math.abs(i[c])&&(c=h);a.push([Math.abs(i[c]),s,c,i[c]])}a.sort((s,i)=>i[0]-s[0]);let o=a.slice(0,3).map(([,s,i,c])=>{let[h,p]=[s,i].map(f=>`token ${f+1} “${j(n[f]??"")}”`);return`${h} gives ${A(c,2)} to ${p}`});return`${t}, ${r.length} by ${r.length} weights. The largest after the first row: ${o.join("; ")}.`}var yr=450;function jt({models:t,runs:e,view:r,source:n,question:a,onChange:o,onRefusal:s}){let[i,c]=U(!1),[h,p]=U(0),f=q(!1),u=Object.keys(t),l=u.every(x=>e[x]&&e[x].tokens.length<t[x].most_tokens),_=async()=>{if(!f.current){f.current=!0;try{let x=await Promise.all(u.map(g=>n.next({...a(g),temperature:h,seed:0})));o(g=>{let w={...g.added};return u.forEach((k,v)=>w[k]=[...w[k],x[v].token]),{added:w,row:null}})}catch(x){c(!1),s({side:"left",message:x.message})}finally{f.current=!1}}};L(()=>{if(!i)return;if(!l){u.every(g=>e[g])&&c(!1);return}let x=setTimeout(_,yr);return()=>clearTimeout(x)});let m=()=>{c(!1),o({added:{left:[],right:[]},row:null})},d=x=>e[x]?.pieces.slice(e[x].pieces.length-r.added[x].length)??[];return b`
    <section class="card generation" aria-labelledby="generation-title">
      <h2 id="generation-title">Token by token</h2>
      <div class="buttons">
        <button type="button" disabled=${!l} onClick=${_}>Step</button>
        <button type="button" disabled=${!l&&!i} aria-pressed=${i}
          onClick=${()=>c(!i)}>${i?"Pause":"Play"}</button>
        <button type="button" disabled=${!r.added.left.length} onClick=${m}>Begin again</button>
        <label class="temperature">Temperature
          <select value=${h} onChange=${x=>p(Number(x.target.value))}>
            ${[0,.5,.8,1,1.5].map(x=>b`<option key=${x} value=${x}>${x||"0, most likely"}</option>`)}
          </select>
        </label>
      </div>
      ${u.map(x=>r.added[x].length>0&&b`
        <p class="written" key=${x}><span class="quiet">${t[x].label} </span>
          ${d(x).map((g,w,k)=>b`<span class=${w===k.length-1?"last":""}>${ce(g)}</span>${r.text.split(/\s+/).includes(g)&&!/^\s/.test(g)?" ":""}`)}
        </p>`)}
      <p class="quiet">Each token adds a row to every map, at the bottom; both models write one at a time.</p>
    </section>`}function kr(t,e,r,n){let a=new Float32Array(r*r);for(let o=0,s=0;o<e;o++){let i=r*Math.floor(o*r/e);for(let c=0;c<=o;c++,s++){let h=i+Math.floor(c*r/e);Math.abs(t[s])>Math.abs(a[h])&&(a[h]=t[s])}}return Uint16Array.from(a,o=>ge(o,n))}function Ut(t,e,r,n){(t.width!==r||t.height!==r)&&(t.width=t.height=r);let a=t.getContext("2d"),o=a.createImageData(r,r),s=te(n);for(let i=0;i<e.length;i++){let c=3*e[i];o.data[4*i]=s[c],o.data[4*i+1]=s[c+1],o.data[4*i+2]=s[c+2],o.data[4*i+3]=255}a.putImageData(o,0,0)}function ve(t,e,r,n,a,o=640){let s=Math.min(r,o);Ut(t,kr(e,r,s,n),s,a)}function we(t,e,r,n){Ut(t,Uint16Array.from(e,a=>255+Math.round(255*a/127)),r,n)}function ye(){let t=q(null),[e,r]=U(0);return L(()=>{let n=new ResizeObserver(([a])=>r(Math.floor(a.contentRect.width)));return n.observe(t.current),()=>n.disconnect()},[]),[t,e]}var Ht=168,Z={left:44,right:10,top:26,bottom:18};function Xe(t,e,r,n,a,o=Ht){let s=J(t.first,n),i=J(e,n),c=t.second?r??t.lam[n]:0,h=t.second?J(t.second,n).map(v=>c*v):null,[p,f]=[0,1e-9];for(let v of[s,i,h??s])for(let y of v)y<p&&(p=y),y>f&&(f=y);let u={width:a-Z.left-Z.right,height:o-Z.top-Z.bottom},l=u.width/t.length,_=v=>Z.left+(v+.5)*l,m=v=>Z.top+(f-v)/(f-p)*u.height,d=v=>`M${Array.from(v,(y,M)=>`${_(M).toFixed(1)},${m(y).toFixed(1)}`).join("L")}`,x=Math.max(1,Math.min(14,l*.62)),g=Array.from(i,(v,y)=>[_(y)-x/2,m(Math.max(0,v)),x,Math.abs(m(v)-m(0)),v]),w=Array.from(i,(v,y)=>[Math.abs(v),y]).sort((v,y)=>y[0]-v[0]).slice(0,4).filter(([v])=>v>.08*f).map(([,v])=>v),k=w.filter((v,y)=>w.slice(0,y).every(M=>Math.abs(_(v)-_(M))>56));return{first:d(s),taken:h&&d(h),bars:g,zero:m(0),x:_,y:m,low:p,high:f,labelled:k,left:i,end:a-Z.right}}function It({maps:t,net:e,lam:r,pieces:n,row:a,isPinned:o}){let[s,i]=ye(),c=i>120?Xe(t,e,r,a,i):null;return b`
    <figure class="curve" ref=${s}>
      <figcaption>
        <span>Row of token ${a+1} <b>${j(n[a]??"",24)}</b>${o?b` <span class="quiet">pinned</span>`:""}</span>
        ${t.second&&b`<span class="legend" aria-hidden="true"><i class="first"></i>A₁<i class="taken"></i>λA₂<i class="net"></i>A₁ − λA₂</span>`}
      </figcaption>
      ${c&&b`
        <svg width=${i} height=${Ht} role="img" aria-label=${Mr(c,n,a)}>
          <line class="axis" x1="44" x2=${c.end} y1=${c.zero} y2=${c.zero} />
          <text class="tick" x="38" y=${c.y(c.high)} dy="0.32em" text-anchor="end">${A(c.high,2)}</text>
          <text class="tick" x="38" y=${c.zero} dy="0.32em" text-anchor="end">0</text>
          ${c.low<-.12*c.high&&b`<text class="tick" x="38" y=${c.y(c.low)} dy="0.32em" text-anchor="end">${A(c.low,2)}</text>`}
          ${c.bars.map(([h,p,f,u,l],_)=>b`<rect key=${_} class=${l<0?"net negative":"net"} x=${h} y=${l<0?c.zero:p} width=${f} height=${u} />`)}
          <path class="first" d=${c.first} />
          ${c.taken&&b`<path class="taken" d=${c.taken} />`}
          ${c.labelled.map(h=>b`<text key=${`l${h}`} class="peak" x=${Math.max(60,Math.min(c.end-20,c.x(h)))}
            y=${c.y(Math.max(c.left[h],0))-7} text-anchor="middle">${j(n[h]??"",10)}</text>`)}
        </svg>`}
    </figure>`}var Mr=(t,e,r)=>`What token ${r+1} “${j(e[r]??"")}” attends to after the subtraction, most to ${t.labelled.map(n=>`token ${n+1} “${j(e[n]??"")}” with ${A(t.left[n],2)}`).join(", ")}.`;var ke={light:["#1c1e22","#6b6f76","#fbfaf7"],dark:["#eceae4","#9a9da4","#121419"]},Dt={light:["#1766a6","#c9620b"],dark:["#5cace7","#eb903c"]},Cr="system-ui, -apple-system, 'Segoe UI', sans-serif",Ar=t=>t.replace(/[&<>"]/g,e=>`&#${e.charCodeAt(0)};`);function I(t,e,r,{size:n=12,colour:a,anchor:o="start",weight:s=400,turn:i=0}){let c=i?` transform="rotate(${i} ${t} ${e})"`:"";return`<text x="${t}" y="${e}" font-size="${n}" fill="${a}" text-anchor="${o}" font-weight="${s}"${c}>${Ar(r)}</text>`}function Bt(t,e,r,n){return[`<svg xmlns="http://www.w3.org/2000/svg" width="${t}" height="${e}" viewBox="0 0 ${t} ${e}" font-family="${Cr}">`,`<rect width="${t}" height="${e}" fill="${ke[r][2]}"/>`,...n,"</svg>"].join(`
`)}var Wt=(t,e,r,n)=>`<image x="${e}" y="${r}" width="${n}" height="${n}" style="image-rendering:pixelated" href="${t.toDataURL("image/png")}"/>`;function Sr({models:t,view:e,panels:r,pieces:n,row:a,scale:o,lam:s,theme:i,left:c,net:h}){let[p,f]=ke[i],u=300,l=52,_=28,m=40+r.length*(u+l)+(r.length-1)*_,d=[I(20,34,`${t.left.name}: layer ${e.left.layer}, head ${e.left.head}${s==null?"":`, λ = ${A(s,2)}`}`,{size:17,colour:p,weight:600})];r.forEach((v,y)=>{let M=20+l+y*(u+l+_),P=66+l,H=document.createElement("canvas");ve(H,v.weights,v.maps.length,o,i),d.push(I(M,P-l-8,v.name,{size:14,colour:p,weight:600}),Wt(H,M,P,u));let O=u/v.maps.length;for(let $=0;$<v.maps.length;$+=Math.max(1,Math.ceil(11/O))){let C=j(n[v.side][$]??"",8),z=($+.5)*O+3.5;d.push(I(M-4,P+z,C,{size:9.5,colour:f,anchor:"end"})),d.push(I(M+z,P-4,C,{size:9.5,colour:f,turn:-90}))}d.push(`<rect x="${M}" y="${P+Math.min(a,v.maps.length-1)*O}" width="${u}" height="${Math.max(1.5,O)}" fill="none" stroke="${p}"/>`)});let x=66+l+u+40,g=Math.min(a,c.length-1),w=Xe(c,h,c.second?s:null,g,m-40);d.push(I(20,x,`Row of token ${g+1} “${j(n.left[g]??"",24)}”`,{size:13,colour:p,weight:600})),d.push(`<g transform="translate(20 ${x+6})">`),d.push(...w.bars.map(([v,y,M,P,H])=>`<rect x="${v}" y="${H<0?w.zero:y}" width="${M}" height="${P}" fill="${p}" opacity="0.32"/>`)),d.push(`<path d="${w.first}" fill="none" stroke="${Dt[i][0]}" stroke-width="1.6"/>`),w.taken&&d.push(`<path d="${w.taken}" fill="none" stroke="${Dt[i][1]}" stroke-width="1.6"/>`),d.push(`<line x1="44" x2="${w.end}" y1="${w.zero}" y2="${w.zero}" stroke="${f}"/>`),d.push(...w.labelled.map(v=>I(w.x(v),w.y(Math.max(0,w.left[v]))-7,j(n.left[v]??"",12),{size:11,colour:p,anchor:"middle"}))),d.push(I(38,w.y(w.high)+4,A(w.high,2),{size:10,colour:f,anchor:"end"}),"</g>");let k=x+200;return d.push(...Pr(20,k,o,i)),c.second&&d.push(I(m-20,k+10,"blue line A₁, orange line λA₂, bars A₁ − λA₂",{size:11,colour:f,anchor:"end"})),Bt(m,k+44,i,d)}function Pr(t,e,r,n){let a=te(n),o=[];for(let s=0;s<64;s++){let i=3*Math.round(510*s/63);o.push(`<rect x="${t+4*s}" y="${e}" width="4.2" height="10" fill="rgb(${a[i]},${a[i+1]},${a[i+2]})"/>`)}return[-1,0,1].forEach(s=>o.push(I(t+128*(1+s),e+24,A(s*r,2),{size:10,colour:ke[n][1],anchor:"middle"}))),o}function zr(t,e,r,n){let[a,o]=ke[n],s=t.heads>8?48:96,i=s+(t.heads>8?8:24),c=[I(20,34,`${t.name}: ${t.label}, all heads`,{size:17,colour:a,weight:600})];for(let h=1;h<=t.layers;h++){let p=56+(h-1)*i;c.push(I(34,p+s/2+4,String(h),{size:11,colour:o,anchor:"end"}));for(let f=1;f<=t.heads;f++){let u=44+(f-1)*(s+8),l=document.createElement("canvas");if(we(l,r(h,f),e.picture_size,n),c.push(Wt(l,u,p,s)),s>60){let _=e.removed?.[h-1][f-1],m=_===void 0?D(h,f):`${D(h,f)}  −${R(_)}`;c.push(I(u,p+s+14,m,{size:10.5,colour:o}))}}}return Bt(64+t.heads*(s+8),64+t.layers*i+8,n,c)}function Ft(t,e){let r=document.createElement("a");r.href=URL.createObjectURL(t),r.download=e,r.click(),setTimeout(()=>URL.revokeObjectURL(r.href),1e4)}async function Vt(t,e,r){let n=new Blob([t],{type:"image/svg+xml"});if(r==="svg"){Ft(n,`${e}.svg`);return}let a=new Image;a.src=URL.createObjectURL(n),await a.decode();let o=document.createElement("canvas");[o.width,o.height]=[2*a.width,2*a.height],o.getContext("2d").drawImage(a,0,0,o.width,o.height),URL.revokeObjectURL(a.src),o.toBlob(s=>Ft(s,`${e}.png`),"image/png")}var Ye=(t,e)=>Vt(Sr(t),`head-${D(t.view.left.layer,t.view.left.head)}`,e),Ze=(t,e,r,n,a)=>Vt(zr(t,e,r,n),`heads-${t.name}`,a);function Tr({picture:t,side:e,theme:r}){let n=q(null);return L(()=>{t&&we(n.current,t,e,r)},[t,e,r]),b`<canvas ref=${n} width="8" height="8" aria-hidden="true"></canvas>`}var Er={ArrowLeft:[0,-1],ArrowRight:[0,1],ArrowUp:[-1,0],ArrowDown:[1,0]};function Gt({side:t,model:e,run:r,chosen:n,theme:a,onChoose:o}){let s=q(null),i=r?.heads,c=B(()=>{if(!i)return null;let m=new Int8Array($e(i.pictures)),d=i.picture_size**2;return(x,g)=>m.subarray(((x-1)*e.heads+g-1)*d,((x-1)*e.heads+g)*d)},[i?.pictures]),h=m=>{let d=Er[m.key];if(!d)return;m.preventDefault();let x=Math.min(e.layers,Math.max(1,n.layer+d[0])),g=Math.min(e.heads,Math.max(1,n.head+d[1]));o({layer:x,head:g}),s.current.querySelector(`[data-head="${D(x,g)}"]`)?.focus()},p=m=>Array.from({length:m},(d,x)=>x+1),f=(m,d)=>i?.removed?.[m-1][d-1],u=(m,d)=>i?.on_answer?.[m-1][d-1],l=(m,d)=>[`Head ${D(m,d)}`,f(m,d)!==void 0&&`the subtraction removes ${R(f(m,d))} of A1`,u(m,d)!==void 0&&`${R(u(m,d))} on the answer`].filter(Boolean).join(", "),_=e.heads>8;return b`
    <section class=${`card grid-card ${_?"dense":""}`} aria-labelledby=${`grid-${t}`}>
      <div class="card-head">
        <h2 id=${`grid-${t}`}>${e.label}, all heads</h2>
        <span class="buttons">
          <button type="button" class="link" disabled=${!i} onClick=${()=>Ze(e,i,c,a,"png")}>PNG</button>
          <button type="button" class="link" disabled=${!i} onClick=${()=>Ze(e,i,c,a,"svg")}>SVG</button>
        </span>
      </div>
      <div class="scroll">
        <div class="grid" role="grid" aria-label=${`Heads of ${e.name}`} ref=${s} onKeyDown=${h}
          style=${`--heads:${e.heads};--thumb:${_?44:e.heads>4?92:124}px`}>
          ${p(e.layers).map(m=>b`
            <div class="grid-row" role="row" key=${m}>
              <span class="layer" role="rowheader"><span class="hidden">Layer </span>${m}</span>
              ${p(e.heads).map(d=>{let x=n.layer===m&&n.head===d;return b`
                  <button type="button" role="gridcell" key=${d} class=${`head ${x?"chosen":""}`}
                    aria-selected=${x} tabindex=${x?0:-1} data-head=${D(m,d)}
                    aria-label=${l(m,d)} title=${l(m,d)} onClick=${()=>o({layer:m,head:d})}>
                    <${Tr} picture=${c?.(m,d)} side=${i?.picture_size} theme=${a} />
                    ${!_&&b`<span class="numbers" aria-hidden="true">
                      ${f(m,d)!==void 0&&b`<span>${f(m,d)>.005?"−":""}${R(f(m,d))}</span>`}
                      ${u(m,d)!==void 0&&b`<span class="on-answer">◎ ${R(u(m,d))}</span>`}
                    </span>`}
                    ${_&&f(m,d)!==void 0&&b`<span class="gauge" aria-hidden="true" style=${{width:R(f(m,d))}}></span>`}
                  </button>`})}
            </div>`)}
        </div>
      </div>
      <p class="quiet">
        Rows are layers, the first on top.
        ${e.subtracts&&(_?" The bar is the share of A₁ that the subtraction removes.":" −n %: the share of A₁ that the subtraction removes.")}
        ${i?.on_answer&&!_?" ◎: the share of the attention that is on the answer.":""}
      </p>
    </section>`}var Nr=46,qr=11;function Kt({panel:t,pieces:e,size:r,scale:n,theme:a,row:o,answer:s,added:i,onHover:c,onPin:h}){let p=q(null),{maps:f,weights:u,name:l}=t;L(()=>{ve(p.current,u,f.length,n,a)},[u,f.length,n,a]);let _=r>=200?Nr:0,m=r-_,d=m/f.length,x=Math.max(1,Math.ceil(qr/d)),g=[];if(_)for(let y=0;y<f.length;y+=x)g.push(y);let w=y=>{let M=p.current.getBoundingClientRect(),P=Math.floor((y.clientY-M.top)/M.height*f.length);return Math.max(0,Math.min(f.length-1,P))},k=y=>_+(y+.5)*d,v=s&&s.end<=f.length;return b`
    <figure class=${`map ${t.strong?"strong":""}`}>
      <figcaption>${l}</figcaption>
      <div class="map-box" style=${{width:`${r}px`,height:`${r}px`}}>
        <canvas ref=${p} width="8" height="8" role="img" aria-label=${Lt(l,u,f,e)}
          data-map=${t.key} style=${{left:`${_}px`,top:`${_}px`,width:`${m}px`,height:`${m}px`}}
          onPointerMove=${y=>c(w(y))} onPointerLeave=${()=>c(null)}
          onClick=${y=>h(w(y))}></canvas>
        <svg width=${r} height=${r} aria-hidden="true">
          ${g.map(y=>b`
            <text key=${`r${y}`} x=${_-4} y=${k(y)} class=${y===o?"on":""} dy="0.32em"
              text-anchor="end">${j(e[y]??"",7)}</text>
            <text key=${`c${y}`} transform=${`translate(${k(y)} ${_-4}) rotate(-90)`} dy="0.32em">${j(e[y]??"",7)}</text>`)}
          ${v&&b`<rect class="answer" x=${_+s.begin*d} y=${_}
            width=${Math.max(1.5,(s.end-s.begin)*d)} height=${m} />`}
          ${i>0&&b`<line class="added" x1=${_} x2=${r} y1=${_+(f.length-i)*d}
            y2=${_+(f.length-i)*d} />`}
          <rect class="row" x=${_} y=${_+o*d} width=${m} height=${Math.max(2,d)} />
        </svg>
      </div>
    </figure>`}function Jt({scale:t,theme:e}){let r=q(null);L(()=>{let a=r.current.getContext("2d"),o=a.createImageData(511,1),s=te(e);for(let i=0;i<511;i++){for(let c=0;c<3;c++)o.data[4*i+c]=s[3*i+c];o.data[4*i+3]=255}a.putImageData(o,0,0)},[e]);let n=[-1,-.25,0,.25,1];return b`
    <div class="scale" role="img" aria-label=${`Colours from orange at −${A(t,2)} over the background at 0 to blue at ${A(t,2)}`}>
      <canvas ref=${r} width="511" height="1"></canvas>
      <div class="ticks" aria-hidden="true">
        ${n.map(a=>b`<span key=${a} style=${{left:`${50+50*Math.sign(a)*Math.sqrt(Math.abs(a))}%`}}>${A(a*t,2)}</span>`)}
      </div>
    </div>`}function Xt({pieces:t,values:e,scale:r,theme:n,row:a,pinned:o,answer:s,added:i,onHover:c,onPin:h}){let p=q(null),f=m=>{let x={ArrowLeft:-1,ArrowRight:1,ArrowUp:-10,ArrowDown:10,Home:-t.length,End:t.length}[m.key];if(m.key==="Escape"&&o!==null)h(o);else if(x!==void 0){m.preventDefault();let g=Math.max(0,Math.min(t.length-1,a+x));c(null),g!==o&&h(g)}},u=m=>{let d=m.target.closest("[data-token]");return d?Number(d.dataset.token):null},l=t.slice(0,8).every(m=>!/^\s|\s$/.test(m))&&t.some(m=>m.length>1),_=m=>["token",m===a&&"on",m===o&&"pinned",s&&m>=s.begin&&m<s.end&&"answer",m>=t.length-i&&"new"].filter(Boolean).join(" ");return b`
    <div class="flow-head">
      <span class="quiet">What token <b>${a+1}</b> attends to. Hover a token or use the arrow keys; a click pins it${o!==null?", Esc lets go":""}.</span>
    </div>
    <div class=${`flow ${l?"spaced":""}`} role="listbox" tabindex="0" aria-label="Tokens of the text" ref=${p}
      aria-activedescendant=${`token-${a}`} onKeyDown=${f} onPointerOver=${m=>c(u(m))}
      onPointerLeave=${()=>c(null)} onClick=${m=>u(m)!==null&&h(u(m))}>
      ${t.map((m,d)=>{let x=d<e.length?e[d]:0,g=d<e.length?{background:Tt(x,r,n),color:Et(x,r,n)}:{};return b`<span key=${d} id=${`token-${d}`} class=${_(d)} style=${g} role="option"
          data-token=${d} aria-selected=${d===a} title=${`token ${d+1}: ${A(x)}`}>${ce(m)}</span>${m.includes(`
`)?b`<br />`:""}`})}
    </div>`}var Zt={text:"",added:{left:[],right:[]},answer:null,lambdas:{all:null,layers:{},heads:{}},left:{layer:1,head:1},right:{layer:1,head:1},row:null},Or=({layer:t,head:e})=>`${t}.${e}`,Yt=t=>t.split(",").filter(Boolean).map(Number);function Qt(t){let e=new URLSearchParams;e.set("text",t.text);for(let s of["left","right"])e.set(s,Or(t[s])),t.added[s].length&&e.set(`${s}-added`,t.added[s].join(","));let{all:r,layers:n,heads:a}=t.lambdas,o=[...r===null?[]:[["all",r]],...Object.entries(n),...Object.entries(a)];return o.length&&e.set("lambda",o.map(([s,i])=>`${s}:${i}`).join(",")),t.answer&&e.set("answer",[t.answer.query,t.answer.begin,t.answer.end].join(",")),t.row!==null&&e.set("row",t.row),`#${e}`}function er(t,e,r){let n=new URLSearchParams(t.slice(1));if(!n.has("text"))return e;let a={...e,text:n.get("text"),answer:null,added:{left:[],right:[]}};for(let i of["left","right"]){let[c,h]=(n.get(i)??"").split(".").map(Number),p=r[i];p&&c>=1&&c<=p.layers&&h>=1&&h<=p.heads&&(a[i]={layer:Math.floor(c),head:Math.floor(h)});let f=Yt(n.get(`${i}-added`)??"");f.every(Number.isInteger)&&(a.added[i]=f)}a.lambdas={all:null,layers:{},heads:{}};for(let i of(n.get("lambda")??"").split(",")){let[c,h]=i.split(":"),p=Number(h);h===void 0||!Number.isFinite(p)||(c==="all"?a.lambdas.all=p:/^\d+$/.test(c)?a.lambdas.layers[c]=p:/^\d+\.\d+$/.test(c)&&(a.lambdas.heads[c]=p))}let o=Yt(n.get("answer")??"");o.length===3&&o.every(Number.isInteger)&&(a.answer={query:o[0],begin:o[1],end:o[2]});let s=Number(n.get("row")??NaN);return Number.isInteger(s)&&s>=0&&(a.row=s),a}var Me=({all:t,layers:e,heads:r},{layer:n,head:a})=>r[`${n}.${a}`]??e[n]??t,Ce=({all:t,layers:e,heads:r})=>t!==null||Object.keys(e).length>0||Object.keys(r).length>0;function Rr({heads:t,kv_heads:e},{head:r}){if(e===t)return"";let n=t/e,a=Math.ceil(r/n);return`shares key/value head ${a} with heads ${(a-1)*n+1}–${a*n}`.replace(/heads (\d+)–\1$/,"head $1")}function tr({models:t,runs:e,maps:r,view:n,theme:a,row:o,hovered:s,shared:i,onHover:c,onChange:h,live:p}){let[f,u]=ye(),[l,_]=[r.left,r.right],m=l&&l.head.layer===n.left.layer&&l.head.head===n.left.head,d=t.left.subtracts?Me(n.lambdas,n.left):null,x=m?d:null,g=B(()=>l?qt(l,x):null,[l,x]),w=B(()=>l?Ot(l.first,l.second??l.first,g,_?.first??g):1,[l,_,g]),k={left:e.left?.pieces??[],right:e.right?.pieces??[]},v=l?x??l.lam?.[Math.min(o,l.length-1)]:null,y=D(n.left.layer,n.left.head),M=[];if(l?.second&&(M.push({key:"first",name:"A₁",side:"left",maps:l,weights:l.first}),M.push({key:"second",name:"A₂",side:"left",maps:l,weights:l.second}),M.push({key:"net",name:"A₁ − λA₂",side:"left",maps:l,weights:g,strong:!0})),_){let T=`${t.right.label} ${D(_.head.layer,_.head.head)}`;M.push({key:"right",name:T,side:"right",maps:_,weights:_.first})}let P=u>=860?M.length:Math.min(2,M.length),H=u>=860?20:12,O=Math.max(0,Math.floor((u-H*(P-1))/Math.max(1,P))),$=T=>h(F=>({row:F.row===T?null:T})),C=[Rr(t.left,n.left)];t.left.lambda_per_token&&C.push("DIFF V2: a λ for every token");let z={models:t,view:n,panels:M,pieces:k,row:o,scale:w,lam:v,theme:a,left:l,net:g,right:_};return b`
    <section class="card head-view" aria-labelledby="head-title">
      <div class="card-head">
        <h2 id="head-title">
          Layer ${n.left.layer}, head ${n.left.head}
          ${v!=null&&b` <span class="quiet">λ = ${A(v,2)}</span>`}
          ${C.filter(Boolean).map(T=>b` <span class="quiet note">${T}</span>`)}
        </h2>
        <span class="buttons">
          <button type="button" class="link" onClick=${()=>navigator.clipboard?.writeText(location.href)}>Copy link</button>
          <button type="button" class="link" disabled=${!l} onClick=${()=>Ye(z,"png")}>PNG</button>
          <button type="button" class="link" disabled=${!l} onClick=${()=>Ye(z,"svg")}>SVG</button>
        </span>
      </div>
      <div ref=${f} class="panels" style=${{gridTemplateColumns:`repeat(${P||1}, 1fr)`,gap:`${H}px`}}>
        ${O>0&&M.map(T=>b`
          <${Kt} key=${T.key} panel=${T} pieces=${k[T.side]} size=${O} scale=${w} theme=${a}
            row=${Math.min(o,T.maps.length-1)} answer=${T.side==="left"||i?n.answer:null}
            added=${n.added[T.side].length} head=${T.side==="left"?y:null}
            onHover=${c} onPin=${$} />`)}
      </div>
      <${Jt} scale=${w} theme=${a} />
      ${l&&b`
        <${Xt} pieces=${k.left.slice(0,l.length)} values=${J(g,Math.min(o,l.length-1))} scale=${w} theme=${a}
          row=${Math.min(o,l.length-1)} pinned=${n.row} answer=${n.answer} added=${n.added.left.length}
          onHover=${c} onPin=${$} />
        <${It} maps=${l} net=${g} lam=${x} pieces=${k.left} row=${Math.min(o,l.length-1)}
          isPinned=${n.row!==null&&s===null} />`}
      ${!p&&Lr(d)}
    </section>`}var Lr=t=>t!==null&&b`<p class="quiet">In this saved page A₁ and A₂ are those of the learned λ; the explorer’s server computes them anew.</p>`;var jr=-.5,Ur=1.5,Qe=t=>t.reduce((e,r)=>e+r,0)/t.length;function et({id:t,name:e,note:r,value:n,learned:a,isSet:o,inherited:s,main:i,onInput:c,onLearned:h}){let p=Math.min(jr,Math.floor(10*a)/10),f=Math.max(Ur,Math.ceil(10*a)/10),u=_=>(_-p)/(f-p),l=Math.max(p,Math.min(f,n));return b`
    <div class=${`slider ${i?"main":""} ${o?"set":""}`}>
      <div class="slider-head">
        <label for=${t}>${e}${r&&b` <span class="quiet">${r}</span>`}</label>
        <output for=${t}>λ = ${A(n,2)}</output>
      </div>
      <div class="track" style=${`--zero-part:${u(0)};--learned-part:${u(a)}`}>
        <input id=${t} type="range" min=${p} max=${f} step="0.01" value=${l}
          aria-valuetext=${`λ ${A(n,2)}; learned ${A(a,2)}`}
          onInput=${_=>c(Number(_.target.value))} />
        <span class="mark zero" aria-hidden="true"></span>
        <span class="mark learned" aria-hidden="true"></span>
      </div>
      <div class="slider-foot">
        <span class="quiet">${o?`learned ${A(a,2)}`:s?"as set above":"as learned"}</span>
        <span class="buttons">
          <button type="button" disabled=${!o} onClick=${h}
            aria-label=${`${e}: back to ${s?"what is set above":"the learned λ"}`}>
            ${s?"As above":"Learned"}
          </button>
          <button type="button" onClick=${()=>c(0)} aria-label=${`${e}: set λ to 0`}>0</button>
        </span>
      </div>
    </div>`}var rr=(t,e)=>Object.fromEntries(Object.entries(t).filter(([r])=>r!==String(e)));function nr({model:t,run:e,place:r,lambdas:n,onChange:a}){if(!e?.learned_lambdas)return b`<section class="card lambda" aria-busy="true"><h2>λ</h2></section>`;let o=e.learned_lambdas,{layer:s,head:i}=r,c=`${s}.${i}`,{all:h,layers:p,heads:f}=n,u=Qe(o[s-1]),l=h===null?t.lambda_per_token?"mean of layers and tokens":"mean of the layers":"";return b`
    <section class="card lambda" aria-labelledby="lambda-title">
      <div class="card-head">
        <h2 id="lambda-title">Move λ</h2>
        <button type="button" class="link" disabled=${!Ce(n)}
          onClick=${()=>a({all:null,layers:{},heads:{}})}>All as learned</button>
      </div>
      <${et} id="lambda-all" main name="All layers" note=${l} value=${h??Qe(o.flat())}
        learned=${Qe(o.flat())} isSet=${h!==null}
        onInput=${_=>a({all:_,layers:{},heads:{}})}
        onLearned=${()=>a({...n,all:null})} />
      <details class="finer" open=${Object.keys(p).length+Object.keys(f).length>0||void 0}>
        <summary>One layer, one head</summary>
        <${et} id="lambda-layer" name=${`Layer ${s}`} value=${p[s]??h??u}
          learned=${u} isSet=${s in p} inherited=${h!==null}
          onInput=${_=>a({...n,layers:{...p,[s]:_}})}
          onLearned=${()=>a({...n,layers:rr(p,s)})} />
        <${et} id="lambda-head" name=${`Head ${c}`} value=${Me(n,r)??o[s-1][i-1]}
          learned=${o[s-1][i-1]} isSet=${c in f} inherited=${h!==null||s in p}
          onInput=${_=>a({...n,heads:{...f,[c]:_}})}
          onLearned=${()=>a({...n,heads:rr(f,c)})} />
      </details>
      <p class="quiet hint">
        λ = 0 leaves A<sub>1</sub>: ordinary attention.
        ${t.lambda_per_token?" DIFF V2 computes a λ for every token; a slider gives all of them the same.":""}
        ${e.recorded_at!==void 0?` What the model predicts was recorded at λ = ${A(e.recorded_at,2)}.`:""}
      </p>
    </section>`}function Q({name:t,value:e,before:r,title:n}){return b`
    <tr title=${n}>
      <th scope="row">${t}</th>
      <td><b>${e}</b></td>
      <td class="before">${r??""}</td>
    </tr>`}function or({run:t,right:e,models:r}){if(!t)return b`<section class="card predictions" aria-busy="true"><h2>Next token</h2></section>`;let n=t.next.slice(0,10),a=Math.max(...t.next.flatMap(i=>[i.probability,i.learned_probability]),1e-9),o=i=>({width:`${100*i/a}%`}),s=t.divergence>0;return b`
    <section class="card predictions" aria-labelledby="next-title">
      <h2 id="next-title">Next token</h2>
      <table class="bars">
        <caption class="hidden">The ten most likely next tokens, with λ as set and as learned</caption>
        <thead class="hidden"><tr><th>token</th><th>bar</th><th>probability</th><th>with the learned λ</th></tr></thead>
        <tbody>
          ${n.map(i=>b`
            <tr key=${i.token}>
              <th scope="row">${j(i.piece)}</th>
              <td class="bar" aria-hidden="true">
                <span class="now" style=${o(i.probability)}></span>
                <span class="was" style=${{left:`${100*i.learned_probability/a}%`}}></span>
              </td>
              <td class="value">${R(i.probability,1)}</td>
              <td class="value was-value">${s?R(i.learned_probability,1):""}</td>
            </tr>`)}
        </tbody>
      </table>
      ${s&&b`<p class="quiet key"><span class="was-key"></span> with the learned λ</p>`}
      <table class="measures" aria-live="polite">
        <thead><tr><td></td><th scope="col">now</th><th scope="col">learned λ</th></tr></thead>
        <tbody>
          <${Q} name="KL to the learned λ" value=${`${A(t.divergence)} nats`}
            title="KL(learned ‖ now) of the next token’s distributions" />
          <${Q} name="Loss on the text" value=${A(t.loss)} before=${A(t.learned_loss)}
            title="Mean over the tokens from the second on, in nats" />
          ${t.answer_probability!==void 0&&b`<${Q} name="Probability of the answer"
            value=${R(t.answer_probability,1)} before=${R(t.learned_answer_probability,1)} />`}
          ${t.answer_share!==void 0&&b`<${Q} name="Attention on the answer" value=${R(t.answer_share,1)}
            before=${R(t.learned_answer_share,1)}
            title="Mean over heads of the share of the absolute weights in the row of the question" />`}
        </tbody>
        ${e&&b`<tbody class="beside">
          <tr><th scope="rowgroup" colspan="3">${r.right.label}</th></tr>
          <${Q} name="Loss on the text" value=${A(e.loss)} />
          ${e.answer_probability!==void 0&&b`<${Q} name="Probability of the answer" value=${R(e.answer_probability,1)} />`}
          ${e.answer_share!==void 0&&b`<${Q} name="Attention on the answer" value=${R(e.answer_share,1)} />`}
          <tr><th scope="row">Next token</th><td colspan="2">${e.next.slice(0,2).map(i=>`${j(i.piece)} ${R(i.probability)}`).join(", ")}</td></tr>
        </tbody>`}
      </table>
    </section>`}var Ae=class extends Error{},Se=class{live=!0;constructor(e="api/"){this.address=e}async#e(e,r){let n;try{n=await fetch(this.address+e,{method:"POST",headers:{"Content-Type":"application/json"},body:JSON.stringify(r)})}catch{throw new Ae("The explorer does not answer; its command may have ended.")}if(!n.ok){let a=await n.json().catch(()=>({}));throw new Ae(a.error??`The explorer answered ${n.status}.`)}return n}run=async e=>(await this.#e("run",e)).json();map=async e=>(await this.#e("map",e)).arrayBuffer();next=async e=>(await this.#e("next",e)).json();example=async e=>(await this.#e("example",e)).json()},Pe=class{live=!1;constructor(e){this.recorded=e}async run({side:e,lambdas:r}){let n=this.recorded.runs[e],a=r??{},o=(c,h)=>c.reduce((p,f)=>Math.abs(f.value-h)<Math.abs(p.value-h)?f:p),s=Object.entries(a.layers??{}),i=null;return s.length&&n.layers[s.at(-1)[0]]?i=o(n.layers[s.at(-1)[0]],s.at(-1)[1]):a.all!==null&&a.all!==void 0&&(i=o(n.all,a.all)),i?{...n.learned,...i.run,recorded_at:i.value}:n.learned}async map({side:e,layer:r,head:n}){return $e(this.recorded.maps[e][`${r}.${n}`])}},pe=class{#e=!1;#t=null;ask(e){if(this.#e){this.#t=e;return}this.#e=!0,e().finally(()=>{this.#e=!1;let r=this.#t;this.#t=null,r&&this.ask(r)})}get waits(){return this.#t!==null}};function ar({data:t,source:e,view:r,onChange:n,onRefusal:a}){let[o,s]=U(r.text),i=q(0),c=q(null);L(()=>s(r.text),[r.text]);let h=(u,l=null)=>{clearTimeout(c.current),n({text:u,answer:l,added:{left:[],right:[]},row:null})},p=u=>{s(u),clearTimeout(c.current),c.current=setTimeout(()=>h(u),350)},f=async()=>{try{i.current+=1;let u=await e.example({seed:i.current});h(u.text,u.answer)}catch(u){a({side:"left",message:u.message})}};return b`
    <section class="card text" aria-labelledby="text-title">
      <div class="card-head">
        <h2 id="text-title"><label for="text">Text</label></h2>
        ${e.live&&t.draws_examples&&b`<button type="button" class="link" onClick=${f}>New needles</button>`}
      </div>
      <textarea id="text" rows="4" spellcheck="false" readonly=${!e.live} value=${o}
        onInput=${u=>p(u.target.value)}></textarea>
      ${e.live&&t.examples.length>0&&b`<p class="examples">
        ${t.examples.map(u=>b`<button type="button" class="chip" key=${u.title}
            onClick=${()=>h(u.text,u.answer)}>${u.title}</button>`)}
      </p>`}
      ${!e.live&&b`<p class="quiet">This page was saved with its text; <code>diff-transformer explore</code> takes any other.</p>`}
    </section>`}var sr={few:48,many:32};function Hr(){let[t,e]=U(Ke);return L(()=>{let r=matchMedia("(prefers-color-scheme: dark)"),n=()=>e(Ke());return r.addEventListener("change",n),()=>r.removeEventListener("change",n)},[]),t}function Ir(t){let e=t.examples[0],r={...Zt,text:e?.text??"",answer:e?.answer??null};return er(location.hash,r,t.models)}function Dr({on_answer:t,removed:e}){let r=t??e;if(!r)return null;let n={layer:1,head:1,number:-1};return r.forEach((a,o)=>a.forEach((s,i)=>{s>n.number&&(n={layer:o+1,head:i+1,number:s})})),{layer:n.layer,head:n.head}}function ir({data:t,source:e}){let{models:r}=t,n=Object.keys(r),a=Hr(),[o,s]=U(()=>Ir(t)),[i,c]=U({}),[h,p]=U({}),[f,u]=U(null),[l,_]=U(null),m=B(()=>Object.fromEntries(["left","right"].map($=>[$,{run:new pe,map:new pe}])),[]),d=q({}),x=q(location.hash.length>1?{left:!0,right:!0}:{}),g=At($=>s(C=>({...C,...$ instanceof Function?$(C):$})),[]),w=$=>{let C={side:$,text:o.text};return o.added[$].length&&(C.append=o.added[$]),$==="left"&&Ce(o.lambdas)&&(C.lambdas=o.lambdas),C},k=$=>o.answer&&($==="left"||t.shared_vocabulary)?{answer:o.answer}:{};for(let $ of n){let C=w($),z={...C,...k($)};L(()=>{if(!o.text.trim())return;let F=r[$].layers*r[$].heads>64?sr.many:sr.few;m[$].run.ask(async()=>{try{let ee=await e.run(z);if(u(V=>V?.side===$?null:V),c(V=>({...V,[$]:{heads:V[$]?.heads,...ee}})),m[$].run.waits||ee.heads)return;let re=await e.run({...z,picture:F});c(V=>({...V,[$]:re}));let W=x.current[$]?null:Dr(re.heads);x.current[$]=!0,W&&g({[$]:W})}catch(ee){u({side:$,message:ee.message})}})},[JSON.stringify(z)]);let T=o[$];L(()=>{o.text.trim()&&m[$].map.ask(async()=>{try{let{append:F,...ee}=C,re=JSON.stringify([ee,T]),W=d.current[$],ze=W?.key===re&&W.append.every((Te,cr)=>F?.[cr]===Te)&&F?.length>W.append.length?W.maps.length:0,tt={...C,layer:T.layer,head:T.head};ze&&(tt.first_row=ze);let rt=Nt(await e.map(tt),W?.maps);d.current[$]={key:re,append:F??[],maps:rt},p(Te=>({...Te,[$]:{...rt,head:T,firstRow:ze}}))}catch(F){u({side:$,message:F.message})}})},[JSON.stringify([C,T])])}let v=i.left,y=v?.tokens.length??0,M=o.added.left.length?y-1:o.answer?.query??y-1,P=Math.max(0,Math.min(l??o.row??M,y-1));L(()=>{document.documentElement.dataset.ready=String(!!(v?.heads&&h.left)),history.replaceState(null,"",Qt(o))});let H=$=>C=>g({[$]:C}),O=$=>g({lambdas:$});return b`
    <header class="top">
      <h1>See the noise cancel</h1>
      <p class="lead">
        Each head of a Differential Transformer looks at the text twice, and takes the second look, times${" "}
        <i>λ</i>, away from the first: <span class="formula">A<sub>1</sub> − λA<sub>2</sub></span>.${" "}
        What both looks share is noise, and it cancels; what only the first one sees is left.${" "}
        <strong>Move λ</strong> and watch what the model attends to and what it would write next.
      </p>
    </header>
    ${f&&b`<p class="refusal" role="alert">${f.message}</p>`}
    <main class="layout">
      <div class="controls">
        <${nr} model=${r.left} run=${v} place=${o.left} lambdas=${o.lambdas} onChange=${O} />
        <${or} run=${v} right=${i.right} models=${r} />
        <${ar} data=${t} source=${e} view=${o} onChange=${g} onRefusal=${u} />
        ${e.live&&b`<${jt} models=${r} runs=${i} view=${o} source=${e} question=${w}
            onChange=${g} onRefusal=${u} />`}
      </div>
      <div class="pictures">
        <${tr} models=${r} runs=${i} maps=${h} view=${o} theme=${a} row=${P} hovered=${l}
          shared=${t.shared_vocabulary} onHover=${_} onChange=${g} live=${e.live} />
        <div class="grids">
          ${n.map($=>b`<${Gt} key=${$} side=${$} model=${r[$]} run=${i[$]}
              chosen=${o[$]} theme=${a} onChoose=${H($)} />`)}
        </div>
      </div>
    </main>
    <footer>
      <p>
        Differential attention: <a href="https://arxiv.org/abs/2410.05258" rel="noreferrer">arXiv 2410.05258</a>.${" "}
        ${n.map($=>`${r[$].name}: ${r[$].label}, ${Fr(r[$])}`).join("; ")}.
      </p>
    </footer>
  `}function Fr({layers:t,heads:e,kv_heads:r}){let n=r!==e?` over ${r} key/value heads`:"";return`${t} ${t===1?"layer":"layers"} of ${e} ${e===1?"head":"heads"}${n}`}function Br(t,e,r){t.classList.add("explorer"),Ie(b`<${ir} data=${e} source=${r} />`,t)}var lr=document.getElementById("explorer-data");if(lr){let t=JSON.parse(lr.textContent),e=t.mode==="recorded"?new Pe(t.recorded):new Se;Br(document.getElementById("explorer"),t,e)}export{Br as show};
